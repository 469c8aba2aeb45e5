import sys

from kda_core.cli import main

sys.exit(main())
