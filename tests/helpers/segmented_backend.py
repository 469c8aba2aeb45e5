"""Backends for the tests of kda-cp that summarise segments themselves, on top of the reference. One has a merge kernel, one also whole
calls beside segments."""

from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F

import kda_core
from kda_core import buffers, slots
from kda_core.backend import BackendSpec
from kda_core.contract import CHECKPOINT_SPACING, Feature, KdaOutputs
from kda_core.reference import ReferenceBackend

SPEC = BackendSpec(
    name="segmented",
    abi=kda_core.BACKEND_ABI,
    archs=frozenset({"cpu"}),
    features=frozenset(f.value for f in Feature),
    target="helpers.segmented_backend:Segmented",
    install="pip install segmented",
    priority=-150,
)
MERGES = replace(SPEC, target="helpers.segmented_backend:Merging")
#: Both without segments over pools, so that core copies the states of split calls.
COPIES_SPEC, COPIES_MERGES = (
    replace(spec, name="copies", features=SPEC.features - {Feature.POOL_SEGMENTS.value})
    for spec in (SPEC, MERGES)
)
MERGING = replace(MERGES, name="merging")
BESIDE = replace(SPEC, name="beside", target="helpers.segmented_backend:Beside")

#: (method, lengths) of every call, in order. Tests clear the list before they use it.
calls = []


class Segmented(ReferenceBackend):
    """Normalises tokens and evaluates gates in `summarize`. `execute_segments` reads the results from the workspace only."""

    def chunk_fwd(self, inputs, outputs):
        calls.append(("chunk_fwd", inputs.sequence_lengths()))
        return super().chunk_fwd(inputs, outputs)

    def segment_workspace_bytes(self, shape):
        return 4 * sum(size.numel() for size in _sizes(shape))

    def summarize(self, inputs, exits, transitions, workspace):
        calls.append(("summarize", inputs.sequence_lengths()))
        s, o = inputs.shape, inputs.options
        if s.pool is not None:
            _read_slots(inputs)
        assert (s.pool is not None or not o.state_v_first) and exits.shape == (s.N, s.HV, s.K, s.V)
        assert transitions.shape == (s.N, s.HV, s.K, s.K)
        q, k, v, g, beta = (x.float() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
        if o.use_qk_l2norm_in_kernel:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        if o.use_gate_in_kernel:
            g = g if inputs.dt_bias is None else g + inputs.dt_bias
            rate = 1.0 if inputs.A_log is None else inputs.A_log.exp()[:, None]
            g = -rate * F.softplus(g) if o.lower_bound is None else o.lower_bound * torch.sigmoid(rate * g)
        if o.use_beta_sigmoid_in_kernel:
            beta = torch.sigmoid(beta) * (2 if o.allow_neg_eigval else 1)
        for place, x in zip(_places(s, workspace), (q, k, v, g, beta)):
            place.copy_(x)
        x = _from_workspace(inputs, workspace)
        x = replace(x, shape=replace(x.shape, options=replace(x.options, state_v_first=False)))
        super().chunk_fwd(x, KdaOutputs(torch.empty_like(x.v), exits))
        eye = torch.eye(s.K).expand_as(transitions).contiguous()
        zeros = torch.zeros(1, s.T, s.HV, s.K)
        x = replace(x, v=zeros, initial_state=eye, shape=replace(x.shape, V=s.K))
        super().chunk_fwd(x, KdaOutputs(zeros.clone(), transitions))

    def execute_segments(self, inputs, outputs):
        calls.append(("execute_segments", inputs.sequence_lengths()))
        x = _from_workspace(inputs, outputs.workspace)
        o = torch.empty_like(x.v)
        if inputs.shape.pool is None:
            super().chunk_fwd(x, replace(outputs, o=o))
        else:
            self._execute_over_pool(inputs, x, replace(outputs, o=o))
        outputs.o.copy_(o)
        outputs.workspace.fill_(255)  # NaN: the contents are valid for one execution
        return outputs

    def _execute_over_pool(self, inputs, x, outputs):
        """Computes segments with dense states, then stores the states of slots; `x`: the inputs in the workspace."""
        pool, of, v_first = inputs.pool, inputs.segments, inputs.options.state_v_first
        with_final = replace(x.options, output_final_state=True)
        dense = inputs.initial_state.mT.contiguous() if v_first else inputs.initial_state
        x = replace(x, initial_state=dense, shape=replace(x.shape, options=with_final))
        final = torch.empty_like(dense)
        super().chunk_fwd(x, replace(outputs, final_state=final))
        skipped, bounds = slots.skipped(pool), inputs.cu_seqlens.tolist()
        for p, (n, before, ends) in enumerate(zip(of.sequence, of.before.tolist(), of.ends)):
            start, end = bounds[p : p + 2]
            if skipped[n]:
                outputs.o[:, start:end] = 0
            elif not ends and outputs.final_state is not None:
                outputs.final_state[p] = final[p].mT if v_first else final[p]
            elif ends and inputs.shape.pool.writes:
                _store(pool, pool.states, pool.write[n], final[p])
            if pool.checkpoints is not None and not skipped[n]:
                for position, slot in _checkpoints_of(pool.checkpoints, n):
                    if before < position <= before + end - start:
                        state = self._state_after(x, p, start, position - before)
                        _store(pool, pool.checkpoints.states, slot, state)

    def _state_after(self, x, p, start, count):
        """Returns the state after `count` tokens of segment p, which starts at token `start`."""
        part = [getattr(x, n)[:, start : start + count] for n in ("q", "k", "v", "g", "beta")]
        offsets = torch.tensor([0, count], dtype=torch.int32)
        options = replace(x.options, return_intermediate_states=False)
        shape = replace(x.shape, T=count, N=1, index_dtype=torch.int32, options=options)
        alone = buffers.make_inputs([*part, None, None, x.initial_state[p : p + 1], offsets, offsets], shape)
        final = torch.empty_like(alone.initial_state)
        super().chunk_fwd(alone, KdaOutputs(torch.empty_like(alone.v), final))
        return final[0]


class Merging(Segmented):
    """Has `merge_segments` as well."""

    def merge_segments(self, initial, exits, transitions, bounds):
        calls.append(("merge_segments", tuple(bounds.tolist())))
        for first, end in pairwise(bounds.tolist()):
            for i in range(first + 1, end):
                before = transitions[i - 1].double() @ initial[i - 1].double()
                initial[i] = exits[first] if i == first + 1 else before + exits[i - 1].double()


class Beside(Merging):
    """Has whole calls beside segments, which it makes one after the other."""

    WHOLE_BYTES = 300  # not a multiple of the alignment of a workspace

    def whole_ends_workspace_bytes(self, first, inner, last):
        assert first.B == inner.B == last.B == 1 and inner.varlen
        assert first.varlen == (first.N > 1) and last.varlen == (last.N > 1)
        return self.WHOLE_BYTES, self.segment_workspace_bytes(inner)

    def summarize_beside(self, whole, whole_outputs, inputs, exits, transitions, workspace):
        self._whole(whole, whole_outputs)
        self.summarize(inputs, exits, transitions, workspace)

    def execute_beside(self, whole, whole_outputs, inputs, outputs):
        self._whole(whole, whole_outputs)
        self.execute_segments(inputs, outputs)

    def _whole(self, inputs, outputs):
        assert outputs.workspace.numel() >= self.WHOLE_BYTES
        outputs.workspace.fill_(255)
        self.chunk_fwd(inputs, outputs)


def _sizes(s):
    """Returns the shapes of q, k, v, g, beta in the workspace."""
    heads = ((s.H, s.K), (s.H, s.K), (s.HV, s.V), (s.HV, s.K), (s.HV,))
    return [torch.Size((1, s.T, *x)) for x in heads]


def _places(s, workspace):
    """Returns q, k, v, g, beta in the workspace, fp32."""
    sizes = _sizes(s)
    numbers = [size.numel() for size in sizes]
    flat = workspace[: 4 * sum(numbers)].view(torch.float32).split(numbers)
    return [x.view(size) for x, size in zip(flat, sizes)]


def _read_slots(inputs):
    """Writes the states in the slots of a pool to the rows of the first segments."""
    states = slots.initial_states(inputs.pool, inputs.shape.state_dtype)
    states = states.mT if inputs.options.state_v_first else states
    first = inputs.segments.before == 0
    inputs.initial_state[first] = states[inputs.segments.sequence.long()][first]


def _checkpoints_of(checkpoints, n):
    """Returns the valid checkpoints of sequence n, without regard to its length, as (position, slot)."""
    found, highest = [], 0
    for i in range(*checkpoints.cu[n : n + 2].clamp(0, len(checkpoints.positions)).tolist()):
        position = int(checkpoints.positions[i])
        if position > highest and position % CHECKPOINT_SPACING == 0:
            found.append((position, checkpoints.indices[i]))
        highest = max(highest, position)
    return found


def _store(pool, states, slot, state):
    """Stores a state in a slot, unless it is no slot."""
    if slots.is_slot(slot, states, pool.first_slot):
        states[slot] = state.to(states.dtype)


def _from_workspace(inputs, workspace):
    """Returns the inputs of a call over the tokens in the workspace."""
    s = inputs.shape
    options = replace(
        s.options, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, lower_bound=None,
        use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    )  # fmt: skip
    shape = replace(
        s, pool=None, dtype=torch.float32, g_dtype=torch.float32, beta_dtype=torch.float32, options=options,
        has_A_log=False, has_dt_bias=False,
    )  # fmt: skip
    rest = [None, None, inputs.initial_state, inputs.cu_seqlens, inputs.cu_seqlens_cpu]
    return buffers.make_inputs([*_places(s, workspace), *rest], shape)
