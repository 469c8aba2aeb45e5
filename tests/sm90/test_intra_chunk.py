"""The intra-chunk stage against the numeric specification, operand by operand; and the images that it writes."""

import pytest
import torch
from helpers.chain_records import sequences
from helpers.intra_chunk_cases import LENGTHS, assert_close, folded, specified, variant
from helpers.sm90_launch import launch, record_places

from kda_core.testing import FAMILIES, make_inputs
from kda_cute import get_kernel
from kda_sm90 import layouts
from kda_sm90.config import HEAD_DIM, PrefillConfig
from kda_sm90.variants import SAMPLE, kernels

NAMES = {"Kd": "kd", "Qd": "qd", "Kg": "kg", "T": "t", "Aqk": "aqk", "a": "a"}  # specification -> workspace


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
    queues, depth = 2, 3
    size = layouts.workspace_bytes(queues * depth, queues, C)
    buffer = torch.zeros(size + 128, dtype=torch.uint8)
    buffer = buffer[-buffer.data_ptr() % 128 :]
    views = layouts.split_workspace(buffer, queues * depth, queues, C)
    for n, view in enumerate(views):
        assert view.data_ptr() % 128 == 0
        assert not view.any(), n
        view.fill_(1)
    assert all(view.shape[0] == queues * depth for view in views[:-2]) and views.carry.shape[0] == queues
    assert views.counters.shape == (3 * layouts.LINE + layouts.LINE,)
    with pytest.raises(ValueError, match="expected at least"):
        layouts.split_workspace(buffer[: size - 1], queues * depth, queues, C)


def computed(x, C, warpgroups, lengths):
    """Returns the records of a call as {name: [chunks, HV, ...]} in fp32. Checks that empty slots were not written. A T that the records do
    not hold is NaN.

    Each ring holds all chunks of its queue, so no record is overwritten.
    """
    (B, T, H, K), HV = x["q"].shape, x["v"].shape[2]
    N = None if lengths is None else len(lengths)
    each, slots = sequences(B, T, C, lengths, compact=C == 32)
    firsts = [first for *_, first in each]
    queues = max(1, 2 * HV - 1)  # most queues cut a sequence
    place, depth = record_places(firsts, slots, HV, queues)
    buffer = torch.full(
        (layouts.workspace_bytes(queues * depth, queues, C),), 0xFF, dtype=torch.uint8, device="cuda"
    )
    workspace = layouts.split_workspace(buffer, queues * depth, queues, C)
    workspace.counters.zero_()
    config = PrefillConfig(C, warpgroups, **variant(x))
    inputs = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    if config.gate != "precomputed":
        inputs |= {n.lower(): x[n] for n in ("A_log", "dt_bias") if n in x}
    if lengths is not None:
        inputs |= {"offsets": x["cu_seqlens"], "offset_bytes": x["cu_seqlens"].element_size()}
    launch(
        config, torch.empty_like(x["v"]), **inputs, workspace=buffer, N=N or B, T=T, H=H, HV=HV,
        beta_bytes=x["beta"].element_size(), l2norm=int(x["use_qk_l2norm_in_kernel"]), every=1,
        beta_factor=float(x["use_beta_sigmoid_in_kernel"]), intra_chunk_ctas=3, queues=queues, depth=depth,
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


def assert_specified(x, C, warpgroups, lengths):
    """Asserts that the records of a call are those of the specification, folded where those of the kernel are."""
    config = PrefillConfig(C, warpgroups, **variant(x))
    found, records = computed(x, C, warpgroups, lengths), [p for p, _ in specified(x, C, lengths)]
    if config.folded:
        records = [folded(p) for p in records]
        T = found.pop("T")
        assert T.isnan().all(), "the records hold T"
    assert_close(found, {n: torch.stack([getattr(p, n) for p in records]) for n in found}, limits(config))


def limits(config):
    """Returns the limits of operands that are rounded otherwise than in the specification: the anchors of a warpgroup are integers, so the
    factors of Aqk have other roundings."""
    return {"Aqk": 2**-7} if config.by_warpgroup else {}


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize(("C", "warpgroups"), ((32, 1), (32, 2), (64, 1)))
@pytest.mark.parametrize("family", (*FAMILIES, "finite masks"))
def test_every_operand_matches_the_specification(family, C, warpgroups):
    x = make_inputs(family, 200, B=2, H=2, HV=4, device="cuda").arguments
    assert_specified(x, C, warpgroups, None)


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize(("C", "warpgroups"), ((32, 1), (32, 2), (64, 1)))
@pytest.mark.parametrize("family", ("slow", "mixed", "memory"))
def test_packed_sequences_and_tails_match_the_specification(family, C, warpgroups):
    x = make_inputs(family, sum(LENGTHS), H=1, HV=2, lengths=LENGTHS, device="cuda").arguments
    assert_specified(x, C, warpgroups, LENGTHS)


#: One variant of each kernel class and mode.
ONE_OF_EACH = {(type(config), getattr(config, "mode", "")): config for config in reversed(SAMPLE)}


@pytest.mark.nightly  # `nox -s test` compiles the whole sample before all tests
@pytest.mark.parametrize("config", ONE_OF_EACH.values(), ids=str)
def test_a_variant_of_each_kernel_compiles_without_a_gpu(config, tmp_path, monkeypatch):
    """In an empty cache folder, so that nothing is loaded."""
    kernel = next(kernel for kernel, offered in kernels() if offered == config)
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path))
    assert callable(get_kernel(kernel, config, "sm_90a"))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"chunk": 16}, "chunk"),
        ({"warpgroups": 3}, "warpgroups"),
        ({"gate": "softplus"}, "unbounded"),
        ({"local": True}, "local"),
        ({"local": True, "chunk": 32, "warpgroups": 2, "states": True}, "local"),
        ({"local": True, "chunk": 32, "warpgroups": 2, "saved_states": True}, "local"),
    ],
)
def test_a_wrong_configuration_is_refused_by_field(wrong, named):
    with pytest.raises(ValueError, match=f"^{named}: "):
        PrefillConfig(**wrong)
