"""One kernel a file. These modules import the CuTe DSL."""
