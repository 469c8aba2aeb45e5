"""The kernel (`prefill`), its chains (`chain`, `summary`) and their schedule. These modules import the CuTe DSL."""
