"""The formulas of the gate and of beta, in torch.

The fp64 oracle in `kda_core.testing.oracle` has formulas of its own: it must not share code with what it checks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_core.contract import KdaOptions

L2NORM_EPS = 1e-6  # FLA's constant


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, options: KdaOptions) -> Tensor:
    """Returns the natural log of the decay, in g's dtype and shape.

    ==========================================  ==============================================================
    options                                     log decay
    ==========================================  ==============================================================
    no `use_gate_in_kernel`                     g
    `use_gate_in_kernel` and `lower_bound`      ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``
    `use_gate_in_kernel`, no `lower_bound`      ``-exp(A_log) * softplus(g + dt_bias)`` (Kimi Linear, arXiv:2510.26692)
    ==========================================  ==============================================================

    Args:
        g: any shape.
        A_log, dt_bias: broadcastable to g; None means a factor exp(A_log) of 1 and a bias of 0.
    """
    if not options.use_gate_in_kernel:
        return g
    if dt_bias is not None:
        g = g + dt_bias.to(g.dtype)
    rate = 1.0 if A_log is None else A_log.to(g.dtype).exp()
    if options.lower_bound is not None:
        return options.lower_bound * torch.sigmoid(rate * g)
    return -rate * F.softplus(g)  # torch's softplus is linear above 20, as FLA's


def step_size(beta: Tensor, options: KdaOptions) -> Tensor:
    """Returns the beta of the recurrence, in beta's dtype and shape: beta itself, ``sigmoid(beta)`` with
    `use_beta_sigmoid_in_kernel`, or ``2 * sigmoid(beta)`` with `allow_neg_eigval` too."""
    if not options.use_beta_sigmoid_in_kernel:
        return beta
    return torch.sigmoid(beta) * (2.0 if options.allow_neg_eigval else 1.0)


def l2_normalised(x: Tensor) -> Tensor:
    """Returns ``x / sqrt(sum(x**2) + 1e-6)``, the sum over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)
