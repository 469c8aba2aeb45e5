"""The kernel (`prefill`), its chains (`chain`, `summary`; parts of them: `store`, `fragments`, `barriers`), and their
`schedule`. These modules import the CuTe DSL."""
