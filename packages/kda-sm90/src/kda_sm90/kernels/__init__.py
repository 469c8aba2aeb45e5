"""The kernel (`prefill`), its chains (`chain`, `summary`, with `fragments`) and their `schedule`. All import the CuTe DSL."""
