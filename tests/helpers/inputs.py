"""Small calls for tests: keyword arguments of chunk_kda on the CPU."""

import torch


def call(B=1, T=20, H=2, HV=2, K=8, V=8, dtype=torch.float32, seed=0):
    """Returns q, k, v, g, beta with unit queries and keys and precomputed gates in [-0.3, 0]."""
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *s: torch.randn(*s, generator=rng)
    unit = lambda *s: torch.nn.functional.normalize(normal(*s), dim=-1)
    x = {"q": unit(B, T, H, K), "k": unit(B, T, H, K), "v": normal(B, T, HV, V)}
    x = {n: t.to(dtype) for n, t in x.items()}
    return x | {
        "g": -0.3 * torch.rand(B, T, HV, K, generator=rng),
        "beta": torch.rand(B, T, HV, generator=rng),
    }


def replaced(x, **changes):
    return {**x, **changes}
