"""Compiled execution: instructions as machine code, made with LLVM. The closures of the handlers are its specification."""
