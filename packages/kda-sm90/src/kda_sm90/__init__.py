"""Kimi Delta Attention for NVIDIA Hopper (sm_90a), a backend of kda-core.

Users call `kda_core.chunk_kda`. kda-core discovers this package through its entry point, `kda_sm90.plugin`.
"""
