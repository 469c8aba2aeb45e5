"""The preparation against the numeric specification, output by output; and the images it writes."""

import pytest
import torch
from direct import launch, places

from kda_core.cute import get_kernel
from kda_core.testing import FAMILIES, make_inputs, specification
from kda_sm90 import layouts
from kda_sm90.config import HEAD_DIM, PrefillConfig
from kda_sm90.variants import SAMPLE

NAMES = {"Kd": "kd", "Qd": "qd", "Kg": "kg", "T": "t", "Aqk": "aqk", "a": "a"}  # specification -> workspace
LENGTHS = (0, 15, 0, 63, 64, 65, 1, 130, 0)


@pytest.mark.parametrize("C", (32, 64))
@pytest.mark.parametrize("name", ("kd", "qd", "kg", "aqk", "t"))
def test_images_hold_every_element_once(name, C):
    columns = C if name in ("aqk", "t") else HEAD_DIM
    logical = torch.arange(C * columns, dtype=torch.float32).view(1, C, columns)
    records = layouts.pack(name, logical, C)
    assert torch.equal(records.sort().values, logical.flatten(1))
    assert torch.equal(layouts.unpack(name, records, C), logical)


@pytest.mark.parametrize("C", (32, 64))
def test_the_workspace_is_split_without_overlap(C):
    streams, depth = 2, 3
    size = layouts.workspace_bytes(streams * depth, streams, C)
    buffer = torch.zeros(size + 128, dtype=torch.uint8)
    buffer = buffer[-buffer.data_ptr() % 128 :]
    views = layouts.split_workspace(buffer, streams * depth, streams, C)
    for n, view in enumerate(views):
        assert view.data_ptr() % 128 == 0
        assert not view.any(), n
        view.fill_(1)
    assert all(view.shape[0] == streams * depth for view in views[:-2]) and views.carry.shape[0] == streams
    assert views.counters.shape == (3 * layouts.LINE + layouts.LINE,)
    with pytest.raises(ValueError, match="expected at least"):
        layouts.split_workspace(buffer[: size - 1], streams * depth, streams, C)


def config_of(x, C):
    bounded = x.get("lower_bound") is not None
    gate = "precomputed" if not x.get("use_gate_in_kernel") else "bounded" if bounded else "softplus"
    return PrefillConfig(C, gate=gate, vote=gate != "bounded", gate_dtype=str(x["g"].dtype)[6:])


def prepare(x, C, lengths):
    """The records of a call as {name: [chunks that exist, HV, ...]} in fp32; other slots have to be untouched. Rings
    that hold every chunk of their streams keep each record."""
    (B, T, H, K), HV = x["q"].shape, x["v"].shape[2]
    N = None if lengths is None else len(lengths)
    slots = layouts.slot_count(B, T, C, N)
    starts = [sum(lengths[:n]) for n in range(N)] if lengths is not None else []
    firsts = [s // C + n for n, s in enumerate(starts)] or list(range(0, slots, slots // B))
    streams = max(1, 2 * HV - 1)  # most of them cut a sequence
    place, depth = places(firsts, slots, HV, streams)
    buffer = torch.full(
        (layouts.workspace_bytes(streams * depth, streams, C),), 0xFF, dtype=torch.uint8, device="cuda"
    )
    workspace = layouts.split_workspace(buffer, streams * depth, streams, C)
    workspace.counters.zero_()
    config = config_of(x, C)
    inputs = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    if config.gate != "precomputed":
        inputs |= {n.lower(): x[n] for n in ("A_log", "dt_bias") if n in x}
    if lengths is not None:
        inputs |= {"offsets": x["cu_seqlens"], "offset_bytes": x["cu_seqlens"].element_size()}
    launch(
        config, torch.empty_like(x["v"]), **inputs, workspace=buffer, N=N or B, T=T, H=H, HV=HV,
        beta_bytes=x["beta"].element_size(), l2norm=int(x["use_qk_l2norm_in_kernel"]), every=1,
        beta_factor=float(x["use_beta_sigmoid_in_kernel"]), preparers=3, streams=streams, depth=depth,
        scale=K**-0.5, lower_bound=float(x.get("lower_bound") or 0.0),
    )  # fmt: skip
    if lengths is None:
        mine = list(range(slots))
    else:
        mine = [first + c for first, size in zip(firsts, lengths) for c in range(-(-size // C))]
    found = {}
    for name, stored in NAMES.items():
        y = layouts.unpack(stored, getattr(workspace, stored).float(), C)
        y = y[place].transpose(0, 1)
        others = [s for s in range(slots) if s not in mine]
        assert torch.isnan(y[others]).all(), f"{name}: a slot without a chunk was written"
        found[name] = -y[mine] if name == "Kd" else y[mine]
    return found


def specified(x, C, lengths):
    """The same from the specification, but for the rounding of normalised rows: the kernel keeps them in fp32."""
    gates = {n: t for n, t in x.items() if n not in ("initial_state", "cu_seqlens")}
    if gates.pop("use_qk_l2norm_in_kernel"):
        for n in ("q", "k"):
            row = gates[n].float()
            gates[n] = row * torch.rsqrt(row.square().sum(-1, keepdim=True) + 1e-6)
    *tensors, bounded = specification.activate(**gates)
    spans = []
    if lengths is None:
        B, T = x["q"].shape[:2]
        spans = [(b, s, min(s + C, T)) for b in range(B) for s in range(0, T, C)]
    else:
        first = 0
        for size in lengths:
            spans += [(0, s, min(s + C, first + size)) for s in range(first, first + size, C)]
            first += size
    chunks = []
    for b, s, e in spans:
        rows = [t[b, s:e].transpose(0, 1) for t in tensors]
        pad = [torch.nn.functional.pad(t, (0, 0) * (t.dim() - 2) + (0, C - (e - s))) for t in rows]
        q, k, v, g, beta = pad
        chunks.append(specification.prepare_chunk(q, k, v, g, beta, x["q"].shape[-1] ** -0.5, bounded))
    return {n: torch.stack([getattr(p, n) for p in chunks]) for n in NAMES}


def assert_close(found, want):
    """Within what one bf16 rounding of another summation order may do, head by head: 2^-8 of the Frobenius norm."""
    for name in NAMES:
        a, b = found[name].double().transpose(0, 1).flatten(1), want[name].double().transpose(0, 1).flatten(1)
        off = ((a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-30)).max().item()
        assert off <= 2**-8, f"{name}: relative difference {off:.2e} from the specification"


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("C", (32, 64))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_output_is_the_specification(family, C):
    x = make_inputs(family, 200, B=2, H=2, HV=4, device="cuda").arguments
    assert_close(prepare(x, C, None), specified(x, C, None))


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("C", (32, 64))
@pytest.mark.parametrize("family", ("slow", "mixed", "memory"))
def test_packed_sequences_and_tails(family, C):
    x = make_inputs(family, sum(LENGTHS), H=1, HV=2, lengths=LENGTHS, device="cuda").arguments
    assert_close(prepare(x, C, LENGTHS), specified(x, C, LENGTHS))


@pytest.mark.parametrize("config", SAMPLE, ids=str)
def test_it_compiles_without_a_gpu(config, tmp_path, monkeypatch):
    from kda_sm90.kernels.prefill import PrefillKernel

    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path))
    assert callable(get_kernel(PrefillKernel, config, "sm_90a"))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"chunk": 16}, "chunk"), ({"warpgroups": 3}, "warpgroups"), ({"gate": "softplus"}, "vote")],
)
def test_a_variant_that_does_not_exist_is_refused(wrong, named):
    with pytest.raises(ValueError, match=f"^{named}: "):
        PrefillConfig(**wrong)
