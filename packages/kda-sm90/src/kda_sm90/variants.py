"""Two sets of kernel variants: a sample that is checked without a GPU, and what is compiled ahead of time.

The sample (`kernels`, for the tests and ``nox -s compile``) has each form of the gate, with and without the vote, both
chunk sizes, both numbers of warpgroups, packed and not, all states and none.

`ahead_of_time` (for ``python -m kda_core precompile``) is what `plan` chooses for common calls: the product of the
options that users of FLA pass, at every size. Not in it, so compiled when a call first needs them:
``allow_neg_eigval``, intermediate states, and a gate in the kernel from an fp32 g, with ``lower_bound`` below -5 or
without ``A_log`` or ``dt_bias``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from kda_core.contract import SAFE_GATE_BOUND, KdaOptions, ProblemShape
from kda_sm90.backend import launches
from kda_sm90.config import HEAD_DIM, ChainConfig, PrepareConfig
from kda_sm90.plan import Plan, plan

_PREPARE: tuple[dict[str, Any], ...] = (
    {},
    {"vote": True, "offsets": "int32"},
    {"gate": "softplus", "vote": True, "offsets": "int64"},
    {"gate": "precomputed", "a_log": False, "dt_bias": False, "gate_dtype": "float32", "vote": True},
    {"gate": "precomputed", "a_log": False, "dt_bias": False, "offsets": "int32"},
    {"beta_sigmoid": False, "beta_dtype": "float32", "l2norm": False, "vote": True, "a_log": False},
)
_CHAIN: tuple[dict[str, Any], ...] = (
    {},
    {"final_state": False, "offsets": "int64"},
    {"initial_state": True, "states": 64, "offsets": "int32"},
    {"initial_state": True, "states": 64, "v_first": True},
)

PREPARE = tuple(PrepareConfig(chunk=chunk, **kind) for chunk in (32, 64) for kind in _PREPARE)
CHAIN = tuple(
    ChainConfig(chunk=chunk, warpgroups=n, **kind) for chunk in (32, 64) for n in (1, 2) for kind in _CHAIN
)


def kernels() -> list[tuple[type, object]]:
    """(kernel class, configuration) of all of them; imports the DSL."""
    from kda_sm90.kernels.chain import ChainKernel
    from kda_sm90.kernels.prepare import PrepareKernel

    return [(PrepareKernel, config) for config in PREPARE] + [(ChainKernel, config) for config in CHAIN]


# ---- ahead of time

#: Options of a gate, and the dtype of g. In the kernel it comes with ``A_log`` and ``dt_bias``.
_GATES: tuple[tuple[dict[str, Any], torch.dtype], ...] = (
    ({"use_gate_in_kernel": True, "lower_bound": SAFE_GATE_BOUND}, torch.bfloat16),
    ({"use_gate_in_kernel": True}, torch.bfloat16),
    *(({"safe_gate": safe}, dtype) for safe in (True, False) for dtype in (torch.bfloat16, torch.float32)),
)

#: Whether bits are pinned, tokens a sequence, sequences, value heads.
_Size = tuple[bool, int, int, int]


def common_shapes() -> Iterator[ProblemShape]:
    """The calls that the ahead-of-time set serves: each combination of options, at each of `_sizes`."""
    sizes, flags, indices = _sizes(), (True, False), (None, torch.int32, torch.int64)
    betas = (torch.bfloat16, torch.float32)
    for gate, l2norm, sigmoid, beta, index in product(_GATES, flags, flags, betas, indices):
        for initial, final, v_first in product(flags, flags, flags):
            for size in sizes:
                yield _shape(size, gate, l2norm, sigmoid, beta, index, initial, final, v_first)


def _sizes() -> list[_Size]:
    """A size for each choice of kernels that the plan makes for one call at many sizes. The choice by size is taken to
    be the same whatever the other options are."""
    found: dict[Plan, _Size] = {}
    for size in product((False, True), (64, 1024, 32768), (1, 4, 32), range(1, 129)):
        found.setdefault(replace(plan(_shape(size)), slots=0), size)
    return list(found.values())


def _shape(
    size: _Size,
    gate: tuple[dict[str, Any], torch.dtype] = _GATES[0],
    l2norm: bool = True,
    sigmoid: bool = True,
    beta: torch.dtype = torch.bfloat16,
    index: torch.dtype | None = None,
    initial: bool = False,
    final: bool = False,
    v_first: bool = False,
) -> ProblemShape:
    pin, tokens, N, HV = size
    options = KdaOptions(
        scale=HEAD_DIM**-0.5,
        output_final_state=final,
        use_qk_l2norm_in_kernel=l2norm,
        use_beta_sigmoid_in_kernel=sigmoid,
        state_v_first=v_first,
        pin=pin,
        **gate[0],
    )
    B, T = (N, tokens) if index is None else (1, N * tokens)
    return ProblemShape(
        B=B, T=T, H=HV, HV=HV, K=HEAD_DIM, V=HEAD_DIM, N=N,
        dtype=torch.bfloat16, g_dtype=gate[1], beta_dtype=beta, index_dtype=index,
        has_A_log=options.use_gate_in_kernel, has_dt_bias=options.use_gate_in_kernel, has_initial_state=initial,
        device_type="cuda", arch=(9, 0), options=options,
    )  # fmt: skip


def ahead_of_time(arch: str) -> list[tuple[type, object]]:
    """(kernel class, configuration) of every launch of `common_shapes`, each once; imports the DSL. `arch` is the one
    that this backend compiles for, as its spec says."""
    return list(dict.fromkeys(pair for shape in common_shapes() for pair in launches(plan(shape))))
