"""Prefill in one call and in two calls with kda-core. Prints which backend runs, and compares the results.

    python examples/quickstart.py

Runs on the CPU of any machine. On a GPU only the device of the tensors changes.
"""

from typing import Any

import torch

from kda_core import backends, chunk_kda, explain

print(backends(), end="\n\n")

# Two sequences of 100 tokens, two query/key heads, four value heads, head dimension 64.
torch.manual_seed(0)
B, T, H, HV, D = 2, 100, 2, 4, 64
q, k = (torch.randn(B, T, H, D).bfloat16() for _ in range(2))
v, g = (torch.randn(B, T, HV, D).bfloat16() for _ in range(2))
beta = torch.randn(B, T, HV).bfloat16()
options: dict[str, Any] = {
    "A_log": torch.zeros(HV),
    "dt_bias": torch.zeros(HV * D),
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,  # the decay is -exp(A_log) * softplus(g + dt_bias)
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
}
print(explain(q, k, v, g, beta, **options), end="\n\n")

whole, final = chunk_kda(q, k, v, g, beta, **options)

cut = 37
tokens: dict[str, Any] = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
first, state = chunk_kda(**{n: x[:, :cut] for n, x in tokens.items()}, **options)
second, last = chunk_kda(**{n: x[:, cut:] for n, x in tokens.items()}, **options, initial_state=state)
joined = torch.cat([first, second], dim=1)

print(f"o {list(whole.shape)} {whole.dtype}, final state {list(final.shape)} {final.dtype}")
print(
    f"two calls against one: o differs by {(joined - whole).abs().max():.1e}, the state by {(last - final).abs().max():.1e}"
)
torch.testing.assert_close(joined, whole)
torch.testing.assert_close(last, final)
