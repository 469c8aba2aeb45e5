"""The preparation against the numeric specification, output by output: emulated for Blackwell and Hopper, and on a Hopper
GPU, for nothing in it is newer."""

import pytest
import torch
from blackwell import Workspace, chunks_of, launch

from kda_core.testing import FAMILIES, make_inputs, specification
from kda_sm100.config import ARCHS, PrepareConfig

LENGTHS = (0, 15, 0, 63, 64, 65, 1, 130, 0)
NAMES = {"w": "w", "u": "u", "Qd": "qd", "Kg": "kg", "Aqk": "aqk", "a": "a"}


def config_of(x, C):
    bounded = x.get("lower_bound") is not None
    gate = "precomputed" if not x.get("use_gate_in_kernel") else "bounded" if bounded else "softplus"
    return PrepareConfig(C, gate=gate, vote=gate != "bounded", gate_dtype=str(x["g"].dtype)[6:])


def prepare(x, C, lengths, arch, seed=0):
    """Records of a call as {name: [chunks, HV, ...]} in fp32; other slots have to be untouched."""
    from kda_sm100.kernels.prepare import ARGUMENTS, PrepareKernel

    (B, T, H, K), HV = x["q"].shape, x["v"].shape[2]
    chunks, slots = chunks_of(B, T, C, lengths)
    workspace = Workspace(slots * HV, C, x["q"].device)
    config = config_of(x, C)
    given = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    if config.gate != "precomputed":
        given |= {n.lower(): x[n] for n in ("A_log", "dt_bias") if n in x}
    if lengths is not None:
        given |= {"offsets": x["cu_seqlens"], "offset_bytes": x["cu_seqlens"].element_size()}
    launch(
        PrepareKernel, ARGUMENTS, config, arch, x["q"], seed, **given, workspace=workspace.bytes,
        N=B if lengths is None else len(lengths), T=T, H=H, HV=HV, beta_bytes=x["beta"].element_size(),
        l2norm=int(x["use_qk_l2norm_in_kernel"]), beta_factor=float(x["use_beta_sigmoid_in_kernel"]),
        scale=K**-0.5, lower_bound=float(x.get("lower_bound") or 0.0),
    )  # fmt: skip
    mine = [slot for *_, slot in chunks]
    others = [slot for slot in range(slots) if slot not in mine]
    found = {}
    for name, stored in NAMES.items():
        records = workspace[stored].float().unflatten(0, (slots, HV))
        assert torch.isnan(records[others]).all(), f"{name}: a slot without a chunk was written"
        found[name] = records[mine]
    return found


def specified(x, C, lengths):
    """The same from the specification, but for the rounding of normalised rows: the kernel keeps them in fp32."""
    gates = {n: t for n, t in x.items() if n not in ("initial_state", "cu_seqlens")}
    if gates.pop("use_qk_l2norm_in_kernel"):
        for n in ("q", "k"):
            row = gates[n].float()
            gates[n] = row * torch.rsqrt(row.square().sum(-1, keepdim=True) + 1e-6)
    *tensors, bounded = specification.activate(**gates)
    found = []
    for b, first, tokens, _ in chunks_of(*x["q"].shape[:2], C, lengths)[0]:
        rows = [t[b, first : first + tokens].transpose(0, 1) for t in tensors]
        q, k, v, g, beta = (
            torch.nn.functional.pad(t, (0, 0) * (t.dim() - 2) + (0, C - tokens)) for t in rows
        )
        p = specification.prepare_chunk(q, k, v, g, beta, x["q"].shape[-1] ** -0.5, bounded)
        products = {"w": -(p.T @ p.Kd), "u": p.T @ v}
        found.append(products | {n: getattr(p, n) for n in NAMES if n not in products})
    return {n: torch.stack([p[n] for p in found]) for n in NAMES}


def assert_close(found, want):
    """Within what one bf16 rounding of another summation order may do, head by head: 2^-8 of the Frobenius norm."""
    for name in NAMES:
        a, b = found[name].double().transpose(0, 1).flatten(1), want[name].double().transpose(0, 1).flatten(1)
        off = ((a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-30)).max().item()
        assert off <= 2**-8, f"{name}: relative difference {off:.2e} from the specification"


@pytest.mark.parametrize(("arch", "C"), [("sm_100a", 64), ("sm_103a", 32), ("sm_90a", 64), ("sm_90a", 32)])
@pytest.mark.parametrize("family", ("slow", "mixed"))
def test_it_is_the_specification(family, arch, C):
    x = make_inputs(family, 100, H=1).arguments
    assert_close(prepare(x, C, None, arch), specified(x, C, None))


@pytest.mark.parametrize("C", (32, 64))
def test_packed_sequences_and_grouped_heads(C):
    lengths = (0, 15, 0, 65, 1)
    x = make_inputs("memory", sum(lengths), H=1, HV=2, lengths=lengths).arguments
    assert_close(prepare(x, C, lengths, ARCHS[0], seed=3), specified(x, C, lengths))


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("C", (32, 64))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_output_on_a_gpu(family, C):
    x = make_inputs(family, 200, B=2, H=2, HV=4, device="cuda").arguments
    assert_close(prepare(x, C, None, "sm_90a"), specified(x, C, None))


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("C", (32, 64))
@pytest.mark.parametrize("family", ("slow", "mixed", "memory"))
def test_packed_sequences_and_tails_on_a_gpu(family, C):
    x = make_inputs(family, sum(LENGTHS), H=1, HV=2, lengths=LENGTHS, device="cuda").arguments
    assert_close(prepare(x, C, LENGTHS, "sm_90a"), specified(x, C, LENGTHS))
