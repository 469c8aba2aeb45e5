"""Kimi Delta Attention, with the public names of FLA."""

from .chunk import chunk_kda

__all__ = ["chunk_kda"]
