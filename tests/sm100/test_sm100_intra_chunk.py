"""The intra-chunk kernel against the numeric specification, output by output.

The tests emulate it for Blackwell and Hopper. They also run it on a Hopper GPU, because it uses no newer instruction.
"""

import pytest
import torch
from helpers.intra_chunk_cases import LENGTHS, assert_close, specified, variant
from helpers.sm100_launch import Workspace, chunks_of, launch

from kda_core.testing import FAMILIES, make_inputs
from kda_sm100.arguments import INTRA_CHUNK
from kda_sm100.config import ARCHS, IntraChunkConfig

NAMES = {"w": "w", "u": "u", "Qd": "qd", "Kg": "kg", "Aqk": "aqk", "a": "a"}


def computed(x, C, lengths, arch, seed=0):
    """Returns the records of a call as {name: [chunks, HV, ...]} in fp32. Checks that empty slots were not written."""
    (B, T, H, K), HV = x["q"].shape, x["v"].shape[2]
    chunks, slots = chunks_of(B, T, C, lengths)
    workspace = Workspace(slots * HV, C, x["q"].device)
    config = IntraChunkConfig(C, **variant(x))
    given = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    if config.gate != "precomputed":
        given |= {n.lower(): x[n] for n in ("A_log", "dt_bias") if n in x}
    if lengths is not None:
        given["offsets"] = x["cu_seqlens"]
    launch(
        INTRA_CHUNK, config, x["q"], arch=arch, seed=seed, **given, workspace=workspace.bytes,
        N=B if lengths is None else len(lengths), T=T, H=H, HV=HV,
        offset_bytes=0 if lengths is None else x["cu_seqlens"].element_size(), beta_bytes=x["beta"].element_size(),
        l2norm=int(x["use_qk_l2norm_in_kernel"]), beta_factor=float(x["use_beta_sigmoid_in_kernel"]),
        scale=K**-0.5, lower_bound=float(x.get("lower_bound") or 0.0),
    )  # fmt: skip
    mine = [slot for *_, slot in chunks]
    others = [slot for slot in range(slots) if slot not in mine]
    found = {}
    for name, stored in NAMES.items():
        records = workspace[stored].float().unflatten(0, (slots, HV))
        assert torch.isnan(records[others]).all(), f"{name}: the kernel wrote a slot without a chunk"
        found[name] = records[mine]
    return found


def wanted(x, C, lengths):
    """Returns the records of the specification in the form of `computed`."""
    found = [p._asdict() | {"w": -(p.T @ p.Kd), "u": p.T @ v} for p, v in specified(x, C, lengths)]
    return {n: torch.stack([p[n] for p in found]) for n in NAMES}


@pytest.mark.parametrize(("arch", "C"), [("sm_100a", 64), ("sm_103a", 32), ("sm_90a", 64), ("sm_90a", 32)])
@pytest.mark.parametrize("family", ("slow", "mixed"))
def test_records_match_the_specification(family, arch, C):
    x = make_inputs(family, 100, H=1).arguments
    assert_close(computed(x, C, None, arch), wanted(x, C, None))


@pytest.mark.parametrize("C", (32, 64))
def test_packed_sequences_and_grouped_heads(C):
    lengths = (0, 15, 0, 65, 1)
    x = make_inputs("memory", sum(lengths), H=1, HV=2, lengths=lengths).arguments
    assert_close(computed(x, C, lengths, ARCHS[0], seed=3), wanted(x, C, lengths))


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("C", (32, 64))
@pytest.mark.parametrize("family", (*FAMILIES, "finite masks"))
def test_records_on_a_gpu(family, C):
    x = make_inputs(family, 200, B=2, H=2, HV=4, device="cuda").arguments
    assert_close(computed(x, C, None, "sm_90a"), wanted(x, C, None))


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("C", (32, 64))
@pytest.mark.parametrize("family", ("slow", "mixed", "memory"))
def test_packed_sequences_on_a_gpu(family, C):
    x = make_inputs(family, sum(LENGTHS), H=1, HV=2, lengths=LENGTHS, device="cuda").arguments
    assert_close(computed(x, C, LENGTHS, "sm_90a"), wanted(x, C, LENGTHS))
