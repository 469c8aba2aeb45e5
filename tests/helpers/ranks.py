"""The end of a spawned process of a group of ranks."""

import os
import sys
from typing import NoReturn

import torch.distributed as dist


def leave() -> NoReturn:
    """Destroys the process group, and ends the process without the destructors of torch.

    After gloo they sometimes abort a process whose work is done ("terminate called without an active exception").
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
