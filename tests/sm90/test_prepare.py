"""The preparation kernel against the numeric specification, output by output; and the images it writes."""

import pytest
import torch

from kda_core.cute import get_kernel
from kda_core.testing import FAMILIES, make_inputs, specification
from kda_sm90 import layouts
from kda_sm90.config import HEAD_DIM, PrepareConfig
from kda_sm90.variants import PREPARE

NAMES = {"w": "w", "u": "u", "Qd": "qd", "Kg": "kg", "Aqk": "aqk", "a": "a"}  # specification -> workspace
LENGTHS = (0, 15, 0, 63, 64, 65, 1, 130, 0)


@pytest.mark.parametrize("C", (32, 64))
@pytest.mark.parametrize("name", ("w", "qd", "kg", "aqk", "u"))
def test_images_hold_every_element_once(name, C):
    columns = C if name == "aqk" else HEAD_DIM
    logical = torch.arange(C * columns, dtype=torch.float32).view(1, C, columns)
    records = layouts.pack(name, logical, C)
    assert torch.equal(records.sort().values, logical.flatten(1))
    assert torch.equal(layouts.unpack(name, records, C), logical)


@pytest.mark.parametrize("C", (32, 64))
def test_the_workspace_is_split_without_overlap(C):
    slots, HV = 3, 2
    size = layouts.workspace_bytes(slots, HV, C)
    buffer = torch.zeros(size + 128, dtype=torch.uint8)
    buffer = buffer[-buffer.data_ptr() % 128 :]
    for n, view in enumerate(layouts.split_workspace(buffer, slots, HV, C)):
        assert view.shape[0] == slots * HV and view.data_ptr() % 128 == 0
        assert not view.any(), n
        view.fill_(1)
    with pytest.raises(ValueError, match="expected at least"):
        layouts.split_workspace(buffer[: size - 1], slots, HV, C)


def config_of(x, C):
    bounded = x.get("lower_bound") is not None
    gate = "precomputed" if not x.get("use_gate_in_kernel") else "bounded" if bounded else "softplus"
    return PrepareConfig(
        chunk=C,
        gate=gate,
        a_log="A_log" in x and gate != "precomputed",
        dt_bias="dt_bias" in x,
        l2norm=x["use_qk_l2norm_in_kernel"],
        beta_sigmoid=x["use_beta_sigmoid_in_kernel"],
        gate_dtype=str(x["g"].dtype)[6:],
        beta_dtype=str(x["beta"].dtype)[6:],
        offsets="int32" if "cu_seqlens" in x else None,
        vote=gate != "bounded",
    )


def prepare(x, C, lengths):
    """The kernel's records as {name: [chunks that exist, HV, ...]} in fp32, and all its slots' raw bytes untouched
    elsewhere."""
    (B, T, _, K), HV = x["q"].shape, x["v"].shape[2]
    N = None if lengths is None else len(lengths)
    slots = layouts.slot_count(B, T, C, N)
    buffer = torch.full((layouts.workspace_bytes(slots, HV, C),), 0xFF, dtype=torch.uint8, device="cuda")
    workspace = layouts.split_workspace(buffer, slots, HV, C)
    config = config_of(x, C)
    a_log, dt_bias = (
        x.get(n) if used else None for n, used in (("A_log", config.a_log), ("dt_bias", config.dt_bias))
    )
    get_kernel(kernel_class(), config, "sm_90a")(
        x["q"], x["k"], x["v"], x["g"], x["beta"], a_log, dt_bias, x.get("cu_seqlens"), *workspace,
        K**-0.5, float(x.get("lower_bound") or -5.0),
    )  # fmt: skip
    torch.cuda.synchronize()
    if lengths is None:
        mine = list(range(slots))
    else:
        starts = [sum(lengths[:n]) for n in range(N)]
        mine = [
            s // C + n + c for n, (s, size) in enumerate(zip(starts, lengths)) for c in range(-(-size // C))
        ]
    found = {}
    for name, stored in NAMES.items():
        y = layouts.unpack(stored, getattr(workspace, stored).float(), C)
        y = y.view(slots, HV, *y.shape[1:])
        others = [s for s in range(slots) if s not in mine]
        assert torch.isnan(y[others]).all(), f"{name}: a slot without a chunk was written"
        found[name] = -y[mine] if name == "w" else y[mine]
    return found


def kernel_class():
    from kda_sm90.kernels.prepare import PrepareKernel

    return PrepareKernel


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


@pytest.mark.parametrize("config", PREPARE, ids=str)
def test_it_compiles_without_a_gpu(config, tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path))
    assert callable(get_kernel(kernel_class(), config, "sm_90a"))
