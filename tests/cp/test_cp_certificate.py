"""The certificate, compared with token-by-token products of all factors."""

import itertools

import pytest
import torch

import kda_core
from kda_core import buffers
from kda_core.contract import Tensors
from kda_core.testing import make_inputs
from kda_core.testing.oracle import log_decay
from kda_cp import certificate
from kda_cp.certificate import SLACK, TAIL, THRESHOLD, certified
from kda_cp.segments import Segment

F64 = torch.float64
SEGMENTS = [Segment(0, 1, 100, TAIL), Segment(0, 2, 100 + TAIL, TAIL + 50)]
GATES = ("bounded", "bounded, no dt_bias", "softplus", "precomputed", "-inf")


def call(gate, HV, K=32):
    """Returns inputs whose tails decay by about e^-20."""
    x = make_inputs("slow", SEGMENTS[-1].start + SEGMENTS[-1].length + 7, H=2, HV=HV, K=K, V=K).arguments
    noise = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(0))
    x |= {
        "A_log": torch.linspace(-0.02, 0.02, HV),
        "dt_bias": torch.linspace(-0.05, 0.05, HV * K).view(HV, K),
    }
    if gate.startswith("bounded"):
        x["g"] = noise - 5.65
    if gate == "bounded, no dt_bias":
        del x["dt_bias"]
    if gate == "softplus":
        x |= {"g": noise - 4.0, "lower_bound": None}
    if gate in ("precomputed", "-inf"):
        x = {n: v for n, v in x.items() if n not in ("A_log", "dt_bias", "lower_bound", "use_gate_in_kernel")}
        x["g"] = noise * -0.06
    if gate == "-inf":
        x["g"][:, SEGMENTS[0].start + TAIL - 5, :, : K // 2] = float("-inf")
    shape = kda_core.explain(**x, backend="reference").shape
    return buffers.make_inputs([x.get(name) for name in Tensors._fields], shape)


def tail(inputs, segment, head):
    """Returns M_tail of a value head, [K, K]."""
    s, g = inputs.shape, inputs.g
    if inputs.options.use_gate_in_kernel:
        g = log_decay(g, inputs.A_log, inputs.dt_bias, inputs.options.lower_bound)
    M = torch.eye(s.K, dtype=F64)
    for t in range(segment.start + segment.length - TAIL, segment.start + segment.length):
        k = inputs.k[0, t, head // (s.HV // s.H)].to(F64)
        k = k * (k.square().sum() + 1e-6).rsqrt()
        M = g[0, t, head].to(F64).exp().unsqueeze(-1) * M
        M = M - inputs.beta[0, t, head].to(F64).sigmoid() * torch.outer(k, k @ M)
    return M


@pytest.mark.parametrize("HV", (2, 6))
@pytest.mark.parametrize("gate", GATES)
def test_segments_are_certified_just_below_the_threshold_and_not_above(gate, HV, monkeypatch):
    monkeypatch.setattr(certificate, "TAILS", HV)  # one segment at a time
    inputs = call(gate, HV)
    assert inputs.options.use_qk_l2norm_in_kernel and inputs.options.use_beta_sigmoid_in_kernel
    norms = torch.stack([torch.stack([tail(inputs, p, h) for h in range(HV)]) for p in SEGMENTS])
    norms = norms.flatten(2).norm(dim=2) + SLACK
    assert 4 * SLACK < norms.min() and norms.max() < THRESHOLD / 2 and norms.unique().numel() == norms.numel()
    # Exit states just below and just above the limit, before a segment whose own exit state has norm 1.
    unit = torch.zeros(HV, 32, 32)
    unit[:, 0, 0] = 1.0
    for n, nearly in itertools.product(range(len(SEGMENTS)), (0.999, 1.001)):
        before = unit * (nearly * THRESHOLD / norms[n]).view(-1, 1, 1)
        exits = [before, unit if n == 0 else unit * 0.0, unit]
        assert (certified(inputs, SEGMENTS, [exits])[n] == (nearly < 1)).all(), (n, nearly)


def test_non_finite_exit_states_are_never_certified():
    inputs, b = call("-inf", 2), torch.ones(2, 32, 32)
    broken = b.clone()
    broken[0, 3, 3] = float("inf")
    broken[1, 3, 3] = float("nan")
    assert not certified(inputs, SEGMENTS, [[b, broken, b]])[0].any()
