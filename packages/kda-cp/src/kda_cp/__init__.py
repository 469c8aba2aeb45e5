"""Context parallelism for Kimi Delta Attention, a planner of kda-core.

Users call `kda_core.chunk_kda`; kda-core finds this package through `kda_cp.plugin`.
"""
