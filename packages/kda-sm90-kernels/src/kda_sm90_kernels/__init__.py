"""Compiled kernels of kda-sm90, as data: ``sm_90a/manifest.json`` and the cubins that it lists.

kda-cute finds the package through the entry point ``kda_core.kernels`` and reads the files; nothing imports it.
"""
