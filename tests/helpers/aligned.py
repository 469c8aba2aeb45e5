"""Memory of a workspace."""

import torch


def aligned(size: int, device: str) -> torch.Tensor:
    """Returns poisoned bytes at an address that is a multiple of 128."""
    buffer = torch.full((size + 128,), 0xFF, dtype=torch.uint8, device=device)
    return buffer[-buffer.data_ptr() % 128 :][:size]
