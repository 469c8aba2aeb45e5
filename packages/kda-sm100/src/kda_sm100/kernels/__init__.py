"""The kernels (`prepare`, `chain`, `summary`, `output`) and what they share (`interface`, `rows`, `tensor`). These modules
import the CuTe DSL."""
