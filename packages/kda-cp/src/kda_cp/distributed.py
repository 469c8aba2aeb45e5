"""Context parallelism across GPUs or processes, over a torch.distributed group (NCCL, gloo or another backend).

1. Each rank summarises its fragments (`kda_cp.summary`).
2. The ranks exchange the summaries: K x (K + V) numbers per fragment and value head, for any length.
3. Each rank merges the summaries (`kda_cp.merge`) and executes its fragments from their true initial states.

The backward has the same steps in the other direction: gradients of states pass from the end of a sequence to its start
(`kda_cp.rank_backward`).

Example::

    table = FragmentTable.contiguous(lengths, ranks=4)
    cp = ContextParallel(group, table)
    q, k, v, g, beta = (table.shard(x, cp.rank) for x in (q, k, v, g, beta))  # or load only these tokens
    o, state = cp.chunk_kda(q, k, v, g, beta, output_final_state=True)

If no sequence crosses ranks, nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count, pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kda_core import buffers, gradients, registry, validate
from kda_core.arguments import Arguments, checked
from kda_core.contract import (
    FLOAT_TENSORS,
    OPTION_NAMES,
    KdaInputs,
    KdaOptions,
    ProblemShape,
    Tensors,
)
from kda_core.errors import ArgumentError, DerivativeError, DtypeError, ShapeError, describe
from kda_cp.agreement import Gather, Position, RankError, Ranks, Step, Terms, attempt
from kda_cp.cache import Cache
from kda_cp.fragment_gradients import FragmentGradients, whole_fragments
from kda_cp.fragments import Fragment, FragmentTable
from kda_cp.local_fragments import LocalFragments, plan_fragments
from kda_cp.merge import merge_segments
from kda_cp.rank_backward import CompletedCall, Kept, RankBackward
from kda_cp.segments import execution_shape

__all__ = ["ContextParallel", "Fragment", "FragmentTable", "RankError"]

_instances = count(1)  # numbers of instances in this process


class _Groups(NamedTuple):
    """The planned fragments of a rank.

    Attributes:
        fragments: fragments that are computed together: those that cross ranks, then the others, or all in one group.
        backend: name of the backend.
        backward: the backward of all fragments; None if the call needs none.
    """

    fragments: list[LocalFragments]
    backend: str
    backward: FragmentGradients | None


@dataclass(frozen=True)
class _Local:
    """The state of a call on one rank after its summaries.

    Attributes:
        inputs: inputs of the rank's tokens.
        backend: name of the backend.
        o: the output of the rank, [1, T_rank, HV, V].
        groups: as `_Groups.fragments`.
        backward: as `_Groups.backward`.
        summaries: (B | M), [summarised fragments, HV, K, V + K], to exchange.
        finals: final states [owned sequences, HV, ...], to exchange; empty if only owners get them.
    """

    inputs: KdaInputs
    backend: str
    o: Tensor
    groups: list[LocalFragments]
    backward: FragmentGradients | None
    summaries: Gather
    finals: Gather


class _Result(NamedTuple):
    """The results of a call on one rank.

    Attributes:
        o: [1, T_rank, HV, V].
        final: [owned sequences, HV, ...]; None if the call does not return final states.
        kept: what the backward needs; None if there is none.
    """

    o: Tensor
    final: Tensor | None
    kept: Kept | None


class ContextParallel:
    """Calls KDA on packed sequences that are distributed over the ranks of a group.

    All ranks of the group construct their instances in the same order, and call them in the same order. The constructor
    compares `table`, `final_state_on` and `tag` between the ranks. Before each call that exchanges data, the ranks check that
    all are in the same call of the same instance.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, or None for the default group. For GPUs prefer a group of
            ``init_process_group("cpu:gloo,cuda:nccl")``: hosts then agree through gloo. Through NCCL alone a host waits until
            its device can start NCCL's kernels.
        table: the distribution of the tokens.
        final_state_on: "owner" gives each rank the states of the sequences whose last token it holds
            (``table.owned(rank)``, in that order). "all" gives every rank all of them.
        tag: a name for error messages, such as that of a layer. Recommended if a program constructs several instances.

    Raises:
        RankError: the ranks have different arguments or construct different instances, or another rank failed or cannot be
            reached.
        ArgumentError: `table` is not a FragmentTable or is for another number of ranks, `final_state_on` is unknown, or
            `tag` is not a str; the other ranks then get a RankError. Also if `group` is a mesh that is not 1-D. Such a mesh
            has no single group, so the other ranks are not informed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None,
        table: FragmentTable,
        *,
        final_state_on: Literal["owner", "all"] = "owner",
        tag: str | None = None,
    ) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ArgumentError("group", "a 1-D DeviceMesh", f"{group.ndim} dimensions")
            group = group.get_group()
        self._ranks = Ranks(group)
        self.group, self.rank, self.ranks = group, self._ranks.rank, self._ranks.size
        self.table, self.final_state_on, self.tag = table, final_state_on, tag
        # Plans of this rank, with the generation of the registry that they belong to.
        self._planned: tuple[int, dict[Any, _Groups]] = -1, {}
        # Completed calls that all ranks agreed on. A rank that fails after the agreement does not count its call, so it
        # disagrees with the next call of the others.
        self._completed = 0
        self._call_terms = Cache(64)
        fields, error = attempt(self._instance_terms)
        tag = tag if isinstance(tag, str) else None
        proposed = Position(Step.CONSTRUCT, next(_instances), tag=tag)
        self._instance = self._ranks.agree(proposed, None if fields is None else Terms(fields), error)
        assert fields is not None  # else `agree` has raised
        self._own_terms = fields
        # Whether the ranks exchange final states, and whether they agree on calls.
        self._everywhere = self.ranks > 1 and self.final_state_on == "all"
        self._agrees = self.table.crosses or self._everywhere

    def _instance_terms(self) -> dict[str, str]:
        """Checks the arguments. Returns the fields of `Terms` that every call has."""
        if not isinstance(self.table, FragmentTable):
            raise ArgumentError("table", "a FragmentTable", describe(self.table))
        if self.final_state_on not in ("owner", "all"):
            raise ArgumentError("final_state_on", "'owner' or 'all'", repr(self.final_state_on))
        if not (self.tag is None or isinstance(self.tag, str)):
            raise ArgumentError("tag", "a str or None", describe(self.tag))
        if self.table.ranks != self.ranks:
            raise ArgumentError(
                "table", f"a table for {self.ranks} ranks, the size of the group", f"{self.table.ranks} ranks"
            )
        return {
            "table": f"sequences={len(self.table.lengths)} tokens={sum(self.table.lengths)} "
            f"fragments={len(self.table.fragments)} digest={self.table.digest()[:12]}",
            "final_state_on": repr(self.final_state_on),
            "tag": repr(self.tag),
        }

    def chunk_kda(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        disable_recompute: bool = False,
        *,
        state_v_first: bool = False,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        backend: str | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Calls ``kda_core.chunk_kda`` over the sequences of the table. All ranks call it, with the same options.

        Arguments that are not listed here, and the heads, dimensions and dtypes of tensors, are those of
        `kda_core.chunk_kda`.

        Training: an input requires grad on all ranks or on none, and all ranks run the backward of the call. A rank gets the
        gradients of its tokens. The gradients of the inputs that ranks share are the shares of this rank, and their sum over ranks
        is the whole, as in data parallelism: those of A_log and dt_bias, and that of initial_state, whose rows are zeros except
        those of sequences that start on this rank. With ``final_state_on="all"`` the gradients of all copies of a final state are
        added. The backward recomputes the states within a fragment, so `disable_recompute` has no effect.

        If data are exchanged, the host waits until the hosts of all ranks have confirmed that none has failed. With gloo for
        the hosts and NCCL for the GPUs, the host does not wait for a device.

        Args:
            q, k, v, g, beta: the tokens of this rank, [1, T_rank, ...], in the order of its fragments.
            initial_state: [N, HV, K, V] for the N sequences of the table, or [N, HV, V, K] with `state_v_first`, on
                every rank or on none. The rank with the first token of a sequence reads the state of that sequence.
            backend: name of a backend, or None. It may differ between ranks. One that is named serves the backward, too;
                otherwise the forward chooses the best backend that has one.

        Returns:
            o [1, T_rank, HV, V], and the final states or None. The states are [len(table.owned(rank)), HV, K, V], or
            [N, HV, K, V] with ``final_state_on="all"``, in fp32 (fp64 for fp64 inputs). With `state_v_first` the last two
            dimensions are [V, K].

        Raises:
            RankError: another rank failed, called with other shapes or options, called another `ContextParallel`, or cannot
                be reached. No states have been exchanged then, unless a rank was lost during the exchange. Also if another
                rank failed in an earlier call after the ranks had agreed on it; then only a new `ContextParallel` works.
            KdaError: the errors of `kda_core.chunk_kda` on this rank; the other ranks then get a RankError.
        """
        # All arguments by name. No other local variable exists yet.
        given = {name: value for name, value in locals().items() if name != "self"}
        floats = [given[name] for name in FLOAT_TENSORS]
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in floats):
            return ChunkKda.apply(self, given, *floats)
        result, _ = self._forward(given, needs_backward=False)
        return result.o, result.final

    def _forward(self, given: dict[str, Any], needs_backward: bool) -> tuple[_Result, CompletedCall]:
        """Makes a call. `given`: the arguments of `chunk_kda` by name."""
        position = Position(Step.CALL, self._instance, self._completed + 1, self.tag)
        local, error = attempt(lambda: self._summarize(given, needs_backward))
        with torch.no_grad():
            if self._agrees:
                terms = None if local is None else self._terms(local.inputs.shape)
                self._ranks.agree(position, terms, error)
            if local is None:
                assert error is not None
                raise error
            wait = self._start_exchange(local, position)
            result, error = attempt(lambda: self._execute(local, wait))
            gathers = self._everywhere and local.inputs.options.output_final_state
            if gathers and not isinstance(error, RankError):  # after a RankError the group cannot be used
                terms = None if result is None else self._terms(local.inputs.shape)
                self._ranks.agree(replace(position, step=Step.COMPLETE), terms, error)
            if result is None:
                assert error is not None
                raise error
            if gathers:
                assert result.final is not None
                result = result._replace(final=self._gather_finals(local, result.final, position))
            if local.groups:
                registry.notify(local.backend, "chunk_fwd", result.o.device.type, "cp.distributed")
            self._completed += self._agrees
            return result, CompletedCall(local.inputs.shape, local.backward, position)

    # ---- summaries

    def _summarize(self, given: dict[str, Any], needs_backward: bool) -> _Local:
        """Checks the arguments of this rank and computes its summaries."""
        gradients.refuse_tangents(FLOAT_TENSORS, [given[name] for name in FLOAT_TENSORS])
        # Without cu_seqlens: the table replaces it.
        args = checked(Arguments(**given, context_parallel="off", needs_backward=needs_backward))
        tensors = Tensors(**{name: getattr(args, name) for name in Tensors._fields})
        with torch.no_grad():
            return self._summarize_fragments(self._inputs(tensors, args.options), args.backend)

    def _inputs(self, tensors: Tensors, options: KdaOptions) -> KdaInputs:
        """Checks the tensors of this rank and returns its inputs; `KdaInputs.initial_state` has all sequences of the table."""
        tokens = sum(f.stop - f.start for f in self.table.of_rank(self.rank))
        state = tensors.initial_state
        # kda-core would compare the initial states with the sequences of this rank, but they are those of the table.
        s = validate.problem_shape(*tensors._replace(initial_state=None), options=options)
        if (s.B, s.T) != (1, tokens):
            raise ShapeError("q", f"[1, {tokens}, H, K], the tokens of rank {self.rank}", f"B={s.B}, T={s.T}")
        if state is not None:
            wanted = (len(self.table.lengths), s.HV, *s.state_matrix)
            if tuple(state.shape) != wanted or state.device != tensors.q.device:
                raise ShapeError(
                    "initial_state",
                    f"{list(wanted)} on {tensors.q.device}",
                    f"{list(state.shape)} on {state.device}",
                )
            if state.dtype != s.state_dtype:
                raise DtypeError("initial_state", str(s.state_dtype), str(state.dtype))
            s = replace(s, has_initial_state=True)
        return buffers.make_inputs(tensors, s)

    def _summarize_fragments(self, inputs: KdaInputs, backend: str | None) -> _Local:
        own, s = self.table.of_rank(self.rank), inputs.shape
        o = inputs.q.new_empty((1, s.T, s.HV, s.V))
        element = o.new_empty((), dtype=s.state_dtype)
        summarised = self._summarised(self.rank)
        counts = [len(self._summarised(r)) for r in range(self.ranks)]
        summaries = Gather(counts, self._ranks, element.expand(s.HV, s.K, s.V + s.K))
        everywhere = self.final_state_on == "all" and s.options.output_final_state
        owned = [len(self.table.owned(r)) if everywhere else 0 for r in range(self.ranks)]
        finals = Gather(owned, self._ranks, element.expand(s.HV, *s.state_matrix))
        planned = self._groups(inputs, backend) if own else _Groups([], backend or "", None)
        groups = [group.for_new_call() for group in planned.fragments]
        for group in groups:
            group.reserve(inputs)
            if not group.crossing:
                continue  # computed while the summaries of other ranks arrive
            first = [self._initial(inputs, own[i]) for i in group.numbers]
            group.summarize(inputs, first, o)
            for i, summary in group.summaries().items():
                summaries.own[summarised.index(own[i])] = summary
        return _Local(inputs, planned.backend, o, groups, planned.backward, summaries, finals)

    def _groups(self, inputs: KdaInputs, backend: str | None) -> _Groups:
        """Returns the planned fragments of this rank, which holds at least one.

        Results are cached until the registry changes, because the device waits while its host plans.
        """
        generation = registry.REGISTRY.generation
        planned_at, known = self._planned
        if planned_at != generation:
            known = {}
            self._planned = generation, known
        key = (inputs.shape, inputs.q.device, backend, registry.REGISTRY.rules(backend))
        if key not in known:
            known[key] = self._plan_groups(inputs, backend)
        return known[key]

    def _plan_groups(self, inputs: KdaInputs, backend: str | None) -> _Groups:
        own, s = self.table.of_rank(self.rank), inputs.shape
        holds_start = [f.start == 0 for f in own]
        holds_end = [f.stop == self.table.lengths[f.sequence] for f in own]
        crossing = [not (start and end) for start, end in zip(holds_start, holds_end)]
        # Crossing fragments form a group of their own if each group is one range of tokens. Otherwise the tokens would
        # have to be copied, which costs more than the overlap with the exchange gains.
        if sum(a != b for a, b in pairwise(crossing)) == 1:
            numbers = [[i for i, c in enumerate(crossing) if c is want] for want in (True, False)]
        else:
            numbers = [list(range(len(own)))]
        whole = whole_fragments(own)
        choice = registry.REGISTRY.resolve(execution_shape(s, [[p] for p in whole]), backend)
        backward = None
        if s.options.needs_backward:
            backward = FragmentGradients(self.table, self.rank, s, backend)
        groups = []
        for group in numbers:
            planned = plan_fragments(
                [whole[i] for i in group],
                [holds_start[i] for i in group],
                [holds_end[i] for i in group],
                inputs,
                choice,
            )
            for shape in planned.shapes(s):
                registry.REGISTRY.resolve(shape, choice.spec.name)  # raises if the backend does not serve it
            groups.append(planned)
        return _Groups(groups, choice.spec.name, backward)

    def _initial(self, inputs: KdaInputs, f: Fragment) -> Tensor | None:
        """Returns the initial state [HV, K, V] of a fragment that holds the start of its sequence.

        Returns None for zeros, and for a fragment whose state depends on other fragments.
        """
        if f.start > 0 or inputs.initial_state is None:
            return None
        state = inputs.initial_state[f.sequence]
        return state.mT if inputs.options.state_v_first else state

    def _summarised(self, rank: int) -> list[Fragment]:
        """Returns the fragments of a rank that do not hold the end of their sequences."""
        return [f for f in self.table.of_rank(rank) if f.stop < self.table.lengths[f.sequence]]

    # ---- exchange and execution

    def _start_exchange(self, local: _Local, position: Position) -> Callable[[], dict[Fragment, Tensor]]:
        """Starts to gather the summaries (B | M) [HV, K, V + K]. Returns a function that waits for them.

        The function returns the summary of each fragment that does not hold the end of its sequence.
        """
        if not self.table.crosses:
            return lambda: dict(zip(self._summarised(self.rank), local.summaries.own.to(local.o.device)))
        wait = local.summaries.start(position)
        return lambda: {
            f: summary for r, by_rank in enumerate(wait()) for f, summary in zip(self._summarised(r), by_rank)
        }

    def _execute(self, local: _Local, wait: Callable[[], dict[Fragment, Tensor]]) -> _Result:
        """Executes the fragments of this rank, those that need no other rank first. `wait`: of `_start_exchange`."""
        inputs, s = local.inputs, local.inputs.shape
        own = self.table.of_rank(self.rank)
        finals: dict[int, Tensor] = {}
        starts: dict[int, Tensor] = {}
        for group in (p for p in local.groups if not p.crossing):
            first = [self._initial(inputs, own[i]) for i in group.numbers]
            group.summarize(inputs, first, local.o)
            known = [self._zeros(s, local.o) if x is None else x for x in first]
            finals |= group.execute(inputs, known, local.o)
            starts |= zip(group.numbers, known)
        summaries = wait()  # a collective: every rank takes part, even one that needs no summary
        for group in (p for p in local.groups if p.crossing):
            found = self._starts(local, group, summaries)
            finals |= group.execute(inputs, found, local.o)
            starts |= zip(group.numbers, found)
        kept = None
        if s.options.needs_backward:
            needed = [] if local.backward is None else local.backward.transitions
            kept = Kept(
                self._stack([starts[i] for i in range(len(own))], local.o, s, s.K, s.V),
                self._stack([summaries[f][..., s.V :] for f in needed], local.o, s, s.K, s.K),
            )
        if not s.options.output_final_state:
            return _Result(local.o, None, kept)
        last = [finals[i] for i, f in enumerate(own) if f.stop == self.table.lengths[f.sequence]]
        return _Result(local.o, self._stack(last, local.o, s, *s.state_matrix), kept)

    def _starts(
        self, local: _Local, group: LocalFragments, summaries: dict[Fragment, Tensor]
    ) -> list[Tensor]:
        """Returns the true states [HV, K, V] at the starts of the fragments of a group."""
        s, own = local.inputs.shape, self.table.of_rank(self.rank)
        sequences = sorted({own[i].sequence for i in group.numbers})
        by_sequence = [self.table.of_sequence(n) for n in sequences]
        fragments = [f for sequence in by_sequence for f in sequence]
        bounds = [*accumulate(map(len, by_sequence), initial=0)]
        new = partial(local.o.new_zeros, dtype=s.state_dtype)
        unused = new(
            (s.HV, s.K, s.V + s.K)
        )  # for the last fragment of a sequence: no state depends on its summary
        known = [summaries[f] if f.stop < self.table.lengths[f.sequence] else unused for f in fragments]
        exits, M = torch.stack(known).split((s.V, s.K), -1)
        states = new((len(fragments), s.HV, s.K, s.V))
        for sequence, number in zip(by_sequence, bounds):
            if (first := self._initial(local.inputs, sequence[0])) is not None:
                states[number].copy_(first)
        merge_segments(group.kernel, bounds, states, exits.contiguous(), M.contiguous())
        found = dict(zip(fragments, states.unbind()))
        return [found[own[i]] for i in group.numbers]

    @staticmethod
    def _zeros(s: ProblemShape, like: Tensor) -> Tensor:
        return like.new_zeros((s.HV, s.K, s.V), dtype=s.state_dtype)

    @staticmethod
    def _stack(matrices: list[Tensor], like: Tensor, s: ProblemShape, rows: int, columns: int) -> Tensor:
        """Returns n matrices [HV, rows, columns] as [n, HV, rows, columns], also if there are none."""
        if matrices:
            return torch.stack(matrices)
        return like.new_empty((0, s.HV, rows, columns), dtype=s.state_dtype)

    def _gather_finals(self, local: _Local, final: Tensor, position: Position) -> Tensor:
        """Returns the final states of all sequences on every rank."""
        owned = [self.table.owned(r) for r in range(self.ranks)]
        local.finals.own.copy_(final)
        by_rank = local.finals.start(position)()
        by_sequence = {n: state for states, ns in zip(by_rank, owned) for n, state in zip(ns, states)}
        return torch.stack([by_sequence[n] for n in range(len(self.table.lengths))])

    def _backward(
        self,
        call: CompletedCall,
        wanted: Sequence[str],
        grad_o: Tensor | None,
        grad_final: Tensor | None,
        tensors: dict[str, Any],
        kept: Kept,
    ) -> dict[str, Tensor]:
        """Returns the gradients of the inputs of this rank by name, in their shapes and dtypes; arguments as in `RankBackward`."""
        sums = self._everywhere and call.shape.options.output_final_state
        terms = self._terms(call.shape) if self._agrees else None
        with torch.no_grad():
            backward = RankBackward(self._ranks, self.table, call, tensors, kept, wanted)
            backward.start(grad_o, grad_final, terms, sums)
            try:
                return backward.finish()
            except Exception:
                # The others may have completed this backward. This rank then disagrees with their next call.
                self._completed -= self._agrees
                raise

    def _terms(self, shape: ProblemShape) -> Terms:
        """Returns the values that must be equal on all ranks in this call.

        They are cached, because the ranks agree at every call.
        """
        # Ranks may differ in the number of their tokens and in the dtypes of g and beta.
        s = replace(shape, T=0, g_dtype=shape.dtype, beta_dtype=shape.dtype)
        return self._call_terms.get(
            s,
            lambda: Terms(
                {
                    **self._own_terms,
                    **{name: str(getattr(s, name)) for name in ("H", "HV", "K", "V", "dtype")},
                    **{
                        name: str(getattr(s, f"has_{name}")) for name in ("initial_state", "A_log", "dt_bias")
                    },
                    **{name: repr(getattr(s.options, name)) for name in OPTION_NAMES},
                }
            ),
        )


_KEPT = tuple(name for name in FLOAT_TENSORS if name != "initial_state")


class ChunkKda(torch.autograd.Function):  # torch shows the name
    """The node of a call of `ContextParallel.chunk_kda`."""

    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, given: dict[str, Any], *floats: Any) -> Any:
        given = given | dict(zip(FLOAT_TENSORS, floats))
        result, ctx.call = cp._forward(given, needs_backward=True)
        assert result.kept is not None  # the call has a backward
        ctx.cp = cp
        ctx.save_for_backward(*(given[name] for name in _KEPT), *result.kept)
        ctx.set_materialize_grads(False)
        return result.o, result.final

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wanted = [name for name, needed in zip(FLOAT_TENSORS, ctx.needs_input_grad[2:]) if needed]
        found = ChunkKdaGradients.apply(ctx.cp, ctx.call, wanted, *grads, *ctx.saved_tensors)
        by_name = dict(zip(wanted, found))
        return (None, None, *(by_name.get(name) for name in FLOAT_TENSORS))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        # torch hides tangents from `forward`, and calls this after it.
        given = zip(FLOAT_TENSORS, tangents[2:])
        raise gradients.forward_mode_error(next(name for name, x in given if x is not None))


class ChunkKdaGradients(torch.autograd.Function):
    """The node of the backward of `ChunkKda`, which has no derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        cp: ContextParallel,
        call: CompletedCall,
        wanted: list[str],
        grad_o: Any,
        grad_final: Any,
        *saved: Any,
    ) -> Any:
        tensors, kept = dict(zip(_KEPT, saved)), Kept(*saved[len(_KEPT) :])
        found = cp._backward(call, wanted, grad_o, grad_final, tensors, kept)
        return tuple(found[name] for name in wanted)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise DerivativeError(gradients.SECOND_DERIVATIVES)
