"""Calls in segments: the launch that summarises them, the merge, and the launch that executes them from their records."""

import functools

import pytest
import torch
from helpers.support import problem_shape

from kda_core import buffers, validate
from kda_core.backend import SupportsWholeEnds
from kda_core.contract import KdaOptions, KdaOutputs
from kda_core.testing import error, make_inputs, token_oracle, tolerance
from kda_sm90 import layouts
from kda_sm90.backend import Sm90Backend
from kda_sm90.launch_config import segment_launch_configs

shape = functools.partial(problem_shape, (9, 0))


def test_the_backend_has_whole_calls_beside_segments():
    """Otherwise the kit skips its test of them."""
    assert isinstance(Sm90Backend(), SupportsWholeEnds)


@pytest.mark.parametrize("sms", (4, 20, 132))
@pytest.mark.parametrize(
    ("T", "N", "HV"), [(1, 1, 1), (8192, 8, 4), (65536, 16, 4), (10**6, 64, 8), (300, 7, 96)]
)
def test_both_launches_fit_on_the_device_and_share_records(T, N, HV, sms):
    s = shape(T=T, N=N, H=HV, HV=HV, index=torch.int32)
    chosen = segment_launch_configs(s, sms)
    summarize, execute = chosen.summarize, chosen.execute
    assert summarize.chunk == execute.chunk and summarize.depth == execute.depth
    assert summarize.records > layouts.slot_count(1, T, execute.chunk, N) * HV
    assert summarize.intra_chunk_ctas >= 1 and execute.intra_chunk_ctas == 0
    assert summarize.intra_chunk_ctas + summarize.queues * (4 // summarize.config.warpgroups) <= sms
    assert 1 <= execute.queues * (2 // execute.config.warpgroups) <= sms
    assert chosen.workspace_bytes >= summarize.workspace_bytes
    assert Sm90Backend().segment_workspace_bytes(s) > 0


def in_segments(x, cuts, initial, v_first):
    """Returns o, final states and transitions of one sequence in segments of the given lengths."""
    HV, K, lengths = x["v"].shape[2], x["q"].shape[3], torch.tensor(cuts)
    bounds = torch.tensor([0, len(cuts)], dtype=torch.int32, device="cuda")
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32).cuda()
    starts = torch.zeros(len(cuts), HV, K, K, device="cuda")
    if initial is not None:
        starts[0] = initial[0]
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    known = {f: x[f] for f in KdaOptions.__dataclass_fields__ if f in x} | {"output_final_state": True}
    backend = Sm90Backend()

    def inputs(states, v_first):
        tensors = [
            *(x.get(name) for name in names),
            states.mT.contiguous() if v_first else states,
            offsets,
            None,
        ]
        s = validate.problem_shape(*tensors, options=KdaOptions(**known | {"state_v_first": v_first}))
        return buffers.make_inputs(tensors, s)

    summary = inputs(starts, False)
    size = backend.segment_workspace_bytes(summary.shape)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    exits, transitions = torch.empty(2, len(cuts), HV, K, K, device="cuda").unbind()
    backend.summarize(summary, exits, transitions, workspace)
    backend.merge_segments(starts, exits, transitions, bounds)
    o, final = torch.empty_like(x["v"]), torch.empty_like(starts)
    outputs = KdaOutputs(o, final, None, workspace)
    assert backend.execute_segments(inputs(starts, v_first), outputs) is outputs
    return o, final.mT if v_first else final, transitions


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("v_first", (False, True), ids=("kv", "vk"))
@pytest.mark.parametrize("family", ("steep", "slow", "memory", "mixed"))
@pytest.mark.parametrize("cuts", [(256, 256, 512, 476), (700, 0, 1, 799), (1500,)], ids=str)
def test_segments_equal_the_whole_sequence(cuts, family, v_first):
    x = make_inputs(family, sum(cuts), H=1, HV=3, device="cuda").arguments
    x.pop("output_final_state", None)
    initial = x.pop("initial_state", None)
    if family == "mixed":
        initial = torch.randn(1, 3, 128, 128, device="cuda")
    o, final, _ = in_segments(x, cuts, initial, v_first)
    call = x | {"initial_state": initial, "output_final_state": True}
    want = token_oracle(**call)
    limits = tolerance(call, 64, oracle=want)
    assert error(o, want[0]) <= limits[0]
    assert error(final[-1:], want[1], state=True) <= limits[1]


@pytest.mark.arch((9, 0))
def test_transitions_map_every_state():
    """For slowly decaying gates: M S of a random S, compared with the oracle without values."""
    cuts, HV = (320, 192, 400), 2
    x = make_inputs("memory", sum(cuts), H=HV, device="cuda").arguments
    x.pop("output_final_state", None)
    x.pop("initial_state")
    _, _, transitions = in_segments(x, cuts, None, False)
    state, start = torch.randn(1, HV, 128, 128, device="cuda"), 0
    for segment, length in enumerate(cuts):
        part = {
            n: t[:, start : start + length] if n in ("q", "k", "v", "g", "beta") else t for n, t in x.items()
        }
        part["v"] = torch.zeros_like(part["v"])
        _, want = token_oracle(**part, initial_state=state, output_final_state=True)
        mapped = transitions[segment].double() @ state[0].double()
        assert error(mapped[None], want, state=True) <= 1e-3
        assert want.norm() > 0.1 * state.norm()
        start += length
