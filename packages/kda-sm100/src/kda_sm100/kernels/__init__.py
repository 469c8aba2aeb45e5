"""The kernels. Importing these modules imports the CuTe DSL."""
