"""Stands for fla-core on a machine without a GPU: the functions that kda-core calls, with the signatures of version 0.6.0.

The functions check their arguments strictly and compute with the fp64 oracle. They have those traits of FLA that an adapter must
know: the identity of cu_seqlens decides about the chunks, graph mode leaves rows undefined, dt_bias is flat.
"""

__version__ = "0.6.0"
