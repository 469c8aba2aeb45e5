"""Kimi Delta Attention for NVIDIA Blackwell (sm_100a, sm_103a), a backend of kda-core.

Users call `kda_core.chunk_kda`. kda-core discovers this package through its entry point, `kda_sm100.plugin`.
"""
