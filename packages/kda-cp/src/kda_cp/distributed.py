"""Context parallelism across GPUs or processes, on torch.distributed: NCCL, gloo, or whatever group it is given.

Each rank computes what its fragments of a sequence do to the state (`kda_cp.summary`), the ranks exchange that, K x (K + V)
numbers a fragment and value head whatever its length, each merges it (`kda_cp.merge`) and runs its fragments from their
true initial states::

    table = FragmentTable.contiguous(lengths, ranks=4)
    cp = ContextParallel(group, table)
    q, k, v, g, beta = (table.shard(x, cp.rank) for x in (q, k, v, g, beta))  # or as they were loaded
    o, state = cp.chunk_kda(q, k, v, g, beta, output_final_state=True)

Where no sequence crosses ranks, nothing is exchanged. Forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count, pairwise
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kda_core import buffers, registry, validate
from kda_core.arguments import Arguments, checked
from kda_core.contract import OPTION_NAMES, KdaInputs, KdaOptions, ProblemShape
from kda_core.errors import ArgumentError, DtypeError, ShapeError, describe
from kda_cp.agreement import CALLS, MAKES, RAN, Moment, RankError, Ranks, Terms
from kda_cp.fragments import Fragment, FragmentTable
from kda_cp.merge import merge_pieces
from kda_cp.part import Part, planned
from kda_cp.pieces import Piece, run_shape
from kda_cp.plan import Cache

__all__ = ["ContextParallel", "Fragment", "FragmentTable", "RankError"]

Value = TypeVar("Value")


_numbers = count(1)  # of instances, in this process


@dataclass(frozen=True)
class _Local:
    """What one rank has prepared of a call.

    Attributes:
        inputs: of this rank's tokens.
        name: of the backend.
        o: that it will write.
        parts: of its fragments, those that cross ranks, then the others where they lie in memory of their own.
        rows: [fragments of `_summarised`, HV, K, V + K], (B | M), to exchange.
        finals: [sequences that it owns, HV, ...], to exchange; without rows where nobody else asks for them.
    """

    inputs: KdaInputs
    name: str
    o: Tensor
    parts: list[Part]
    rows: _Gather
    finals: _Gather


class _Gather:
    """Each rank's rows, to be gathered by all. Its memory is there before the ranks agree, so that none fails alone later.

    Args:
        counts: rows of each rank; on the way they are padded to the most.
        ranks: of the group.
        like: [...], a row's shape, its dtype, and the device of `mine` and of the result.
    """

    def __init__(self, counts: list[int], ranks: Ranks, like: Tensor) -> None:
        self._counts, self._ranks, self._device = counts, ranks, like.device
        most = max(counts)
        self._sent = like.new_zeros((most, *like.shape), device=ranks.device)
        self._found = self._sent.new_empty((len(counts) * most, *like.shape))
        self.mine = self._sent[: counts[ranks.rank]]

    def begin(self, moment: Moment) -> Callable[[], list[Tensor]]:
        """Sends `mine`, and gives what waits for the rows of each rank: on a GPU the stream does, not the host."""
        arrived = self._ranks.begin_gather(self._found, self._sent, moment)

        def wait() -> list[Tensor]:
            arrived()
            parts = self._found.unflatten(0, (len(self._counts), -1))
            return [part[:n].to(self._device) for part, n in zip(parts, self._counts)]

        return wait


class ContextParallel:
    """Calls of KDA on packed sequences that are spread over the ranks of a group.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, or None for the default group. On GPUs best one of
            ``init_process_group("cpu:gloo,cuda:nccl")``: hosts then agree through gloo. Through NCCL alone they wait for room on
            their devices.
        table: who holds what.
        final_state_on: "owner" gives each rank the states of the sequences whose last token it holds
            (``table.owned(rank)``, in that order), "all" every rank all of them.
        tag: a name for messages, such as that of the layer. Give one where a program makes several.

    All ranks of the group make their instances in the same order and call them in the same order. They compare table,
    `final_state_on` and `tag` here, and before each call that exchanges data that they are in the same call of the same instance.

    Raises:
        RankError: the ranks gave different ones, make different instances, or another rank failed or cannot be reached.
        ArgumentError: what is no table or one for another number of ranks, another `final_state_on`, a `tag` that is no text;
            then the other ranks get a RankError. A mesh of several dimensions: it has no one group, so nobody tells the others.
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
        self._plans: tuple[Any, dict[Any, tuple[list[Part], str]]] = None, {}
        self._completed = 0  # calls that ranks agreed on. One that failed later on a rank would meet the next one of the others
        self._known_terms = Cache(64)
        words, error = _attempt(self._checked_terms)
        proposed = Moment(MAKES, next(_numbers), tag=tag if isinstance(tag, str) else None)
        self._instance = self._ranks.agree(proposed, None if words is None else Terms(words), error)
        assert words is not None  # else `agree` has raised
        self._own_terms = words

    def _checked_terms(self) -> dict[str, str]:
        """What must be the same on all ranks in every call, in words."""
        if not isinstance(self.table, FragmentTable):
            raise ArgumentError("table", "a FragmentTable", describe(self.table))
        if self.final_state_on not in ("owner", "all"):
            raise ArgumentError("final_state_on", "'owner' or 'all'", repr(self.final_state_on))
        if not (self.tag is None or isinstance(self.tag, str)):
            raise ArgumentError("tag", "a text or None", describe(self.tag))
        if self.table.ranks != self.ranks:
            raise ArgumentError(
                "table", f"one for {self.ranks} ranks, the size of the group", f"{self.table.ranks} ranks"
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
        """``kda_core.chunk_kda`` over the sequences of the table; all ranks call it, with the same options.

        The host waits for the hosts of the other ranks where something is exchanged, for ranks first tell each other that all
        is well. With gloo for the hosts and NCCL for the GPUs it waits for no device.

        Args:
            q, k, v, g, beta: the tokens of this rank, [1, T_rank, ...], in the order of its fragments; else as in
                `kda_core.chunk_kda`, and so the options.
            initial_state: [N, HV, K, V] for the N sequences of the table, or [N, HV, V, K] with `state_v_first`, on
                every rank or on none. A row is read by the rank that holds the first token of its sequence.
            backend: may differ between ranks.

        Returns:
            o [1, T_rank, HV, V]; the final states, [len(table.owned(rank)), HV, K, V] or, where they are on all ranks,
            [N, HV, K, V], fp32 (fp64 for fp64 inputs), or None. With `state_v_first` the last two dimensions are [V, K].

        Raises:
            RankError: another rank failed, called with other shapes or options, called another `ContextParallel`, or cannot be
                reached; or it failed in an earlier call after the ranks agreed on that: then only a new `ContextParallel`
                brings them together. No states have been exchanged, unless a rank is lost during the exchange.
            Otherwise as `kda_core.chunk_kda`; then the other ranks get a RankError.
        """
        given = {n: x for n, x in locals().items() if n != "self"}
        everywhere = self.ranks > 1 and self.final_state_on == "all"
        agrees = self.table.crosses or everywhere
        here = Moment(CALLS, self._instance, self._completed + 1, self.tag)
        local, error = _attempt(lambda: self._prepare(given))
        with torch.no_grad():
            if agrees:
                self._ranks.agree(here, None if local is None else self._terms(local.inputs.shape), error)
            if local is None:
                assert error is not None
                raise error
            gathered = self._exchange(local, here)
            run, error = _attempt(lambda: self._run(local, gathered))
            gathers = everywhere and output_final_state
            if gathers and not isinstance(error, RankError):  # after that no word reaches anybody
                terms = None if run is None else self._terms(local.inputs.shape)
                self._ranks.agree(replace(here, step=RAN), terms, error)
            if run is None:
                assert error is not None
                raise error
            o, final = run
            if gathers:
                final = self._all_final(local, final, here)
            if local.parts:
                registry.notify(local.name, "chunk_fwd", o.device.type, "cp.distributed")
            self._completed += agrees
            return o, final if output_final_state else None

    # ---- the parts of a call

    def _prepare(self, given: dict[str, Any]) -> _Local:
        """Validates this rank's part and computes its summaries."""
        args = checked(
            Arguments(**given, context_parallel="off")
        )  # without cu_seqlens, which the table replaces
        options = args.options
        if options.needs_backward:
            raise ArgumentError("q", "inputs that do not require grad: this is forward only", "one that does")
        with torch.no_grad():
            return self._prepared(args.tensors, options, args.backend)

    def _prepared(self, tensors: Sequence[Any], options: KdaOptions, backend: str | None) -> _Local:
        own = self.table.of_rank(self.rank)
        lengths = [f.stop - f.start for f in own]
        state = tensors[7]
        ordered = [*tensors[:7], None, None, None]
        s = validate.problem_shape(*ordered, options=options)
        if (s.B, s.T) != (1, sum(lengths)):
            raise ShapeError(
                "q", f"[1, {sum(lengths)}, H, K], the tokens of rank {self.rank}", f"B={s.B}, T={s.T}"
            )
        if state is not None:
            wanted = (len(self.table.lengths), s.HV, *s.state_matrix)
            if tuple(state.shape) != wanted or state.device != tensors[0].device:
                raise ShapeError(
                    "initial_state",
                    f"{list(wanted)} on {tensors[0].device}",
                    f"{list(state.shape)} on {state.device}",
                )
            if state.dtype != s.state_dtype:
                raise DtypeError("initial_state", str(s.state_dtype), str(state.dtype))
            s = replace(s, has_initial_state=True)
            ordered[7] = state
        checked = buffers.make_inputs(ordered, s)

        o = checked.q.new_empty((1, s.T, s.HV, s.V))
        summarised = self._summarised(self.rank)
        rows = self._gather(
            [len(self._summarised(r)) for r in range(self.ranks)], o, (s.HV, s.K, s.V + s.K), s
        )
        everywhere = self.final_state_on == "all" and options.output_final_state
        owned = [len(self.table.owned(r)) if everywhere else 0 for r in range(self.ranks)]
        finals = self._gather(owned, o, (s.HV, *s.state_matrix), s)
        known, name = self._planned(checked, backend) if own else ([], backend or "")
        parts = [part.fresh() for part in known]
        for part in parts:
            part.reserve(checked)
            if not part.crossing:
                continue  # its turn comes while the others' rows are on their way
            first = [self._initial(checked, own[i]) for i in part.fragments]
            part.summarize(checked, first, o)
            for i, row in part.rows().items():
                rows.mine[summarised.index(own[i])] = row
        return _Local(checked, name, o, parts, rows, finals)

    def _gather(self, counts: list[int], o: Tensor, shape: tuple[int, ...], s: ProblemShape) -> _Gather:
        like = o.new_empty((), dtype=s.state_dtype).expand(shape)
        return _Gather(counts, self._ranks, like)

    def _planned(self, inputs: KdaInputs, backend: str | None) -> tuple[list[Part], str]:
        """This rank's fragments, planned, and the name of the backend; kept from call to call as core keeps what it finds out
        about calls, for devices wait while a host plans."""
        current = registry.REGISTRY.generation
        made_with, known = self._plans
        if made_with is not current:
            known = {}
            self._plans = current, known
        key = (inputs.shape, inputs.q.device, backend, registry.REGISTRY.rules(backend))
        if key not in known:
            known[key] = self._parts(inputs, backend)
        return known[key]

    def _parts(self, inputs: KdaInputs, backend: str | None) -> tuple[list[Part], str]:
        own, s = self.table.of_rank(self.rank), inputs.shape
        crossing = [f.stop - f.start < self.table.lengths[f.sequence] for f in own]
        # two parts need two ranges of tokens: copies would cost more than what is gained by overlap
        apart = any(crossing) and sum(a != b for a, b in pairwise(crossing)) == 1
        groups = [[i for i, c in enumerate(crossing) if c is want] for want in (True, False)]
        if not apart:
            groups = [list(range(len(own)))]
        cuts = list(accumulate((f.stop - f.start for f in own), initial=0))
        whole = [[Piece(i, 0, a, b - a)] for i, (a, b) in enumerate(pairwise(cuts))]
        choice = registry.REGISTRY.resolve(run_shape(s, whole), backend)
        parts = []
        for group in groups:
            begins = [own[i].start == 0 for i in group]
            ends = [own[i].stop == self.table.lengths[own[i].sequence] for i in group]
            part = planned([whole[i][0] for i in group], begins, ends, inputs, choice)
            for shape in part.shapes(s):
                registry.REGISTRY.resolve(shape, choice.spec.name)
            parts.append(part)
        return parts, choice.spec.name

    def _initial(self, inputs: KdaInputs, f: Fragment) -> Tensor | None:
        """The state [HV, K, V] before a fragment, where it is known without the other ranks: None for zeros."""
        if f.start > 0 or inputs.initial_state is None:
            return None
        state = inputs.initial_state[f.sequence]
        return state.mT if inputs.options.state_v_first else state

    def _summarised(self, rank: int) -> list[Fragment]:
        """Fragments of a rank that others follow."""
        return [f for f in self.table.of_rank(rank) if f.stop < self.table.lengths[f.sequence]]

    def _exchange(self, local: _Local, here: Moment) -> Callable[[], dict[Fragment, Tensor]]:
        """Begins to gather the rows (B | M) [HV, K, V + K] of all fragments that others follow, and gives what waits for them."""
        if not self.table.crosses:
            return lambda: dict(zip(self._summarised(self.rank), local.rows.mine.to(local.o.device)))
        gathered = local.rows.begin(here)
        return lambda: {
            f: row for r, part in enumerate(gathered()) for f, row in zip(self._summarised(r), part)
        }

    def _run(self, local: _Local, gathered: Callable[[], dict[Fragment, Tensor]]) -> tuple[Tensor, Tensor]:
        """o of this rank, and the final states of the sequences that it owns. What needs no other rank goes first."""
        inputs, s = local.inputs, local.inputs.shape
        own = self.table.of_rank(self.rank)
        finals: dict[int, Tensor] = {}
        for part in (p for p in local.parts if not p.crossing):
            first = [self._initial(inputs, own[i]) for i in part.fragments]
            part.summarize(inputs, first, local.o)
            finals |= part.run(inputs, [self._zeros(s, local.o) if x is None else x for x in first], local.o)
        rows = gathered()  # also where this rank needs none of them: the others do
        for part in (p for p in local.parts if p.crossing):
            finals |= part.run(inputs, self._starts(local, part, rows), local.o)
        if not s.options.output_final_state:
            return local.o, local.o
        last = [finals[i] for i, f in enumerate(own) if f.stop == self.table.lengths[f.sequence]]
        empty = local.o.new_empty((0, s.HV, *s.state_matrix), dtype=s.state_dtype)
        return local.o, torch.stack(last) if last else empty

    def _starts(self, local: _Local, part: Part, rows: dict[Fragment, Tensor]) -> list[Tensor]:
        """The true states [HV, K, V] at the starts of a part's fragments."""
        s, own = local.inputs.shape, self.table.of_rank(self.rank)
        here = sorted({own[i].sequence for i in part.fragments})
        chains = [self.table.of_sequence(n) for n in here]
        fragments = [f for chain in chains for f in chain]
        bounds = [*accumulate(map(len, chains), initial=0)]
        new = partial(local.o.new_zeros, dtype=s.state_dtype)
        none = new((s.HV, s.K, s.V + s.K))  # of the last ones, and nothing depends on it
        known = [rows[f] if f.stop < self.table.lengths[f.sequence] else none for f in fragments]
        exits, M = torch.stack(known).split((s.V, s.K), -1)
        states = new((len(fragments), s.HV, s.K, s.V))
        for chain, at in zip(chains, bounds):
            if (first := self._initial(local.inputs, chain[0])) is not None:
                states[at].copy_(first)
        merge_pieces(part.kernel, bounds, states, exits.contiguous(), M.contiguous())
        found = dict(zip(fragments, states.unbind()))
        return [found[own[i]] for i in part.fragments]

    @staticmethod
    def _zeros(s: ProblemShape, like: Tensor) -> Tensor:
        return like.new_zeros((s.HV, s.K, s.V), dtype=s.state_dtype)

    def _all_final(self, local: _Local, final: Tensor, here: Moment) -> Tensor:
        owned = [self.table.owned(r) for r in range(self.ranks)]
        local.finals.mine.copy_(final)
        parts = local.finals.begin(here)()
        by_sequence = {n: row for part, ns in zip(parts, owned) for n, row in zip(ns, part)}
        return torch.stack([by_sequence[n] for n in range(len(self.table.lengths))])

    def _terms(self, shape: ProblemShape) -> Terms:
        """What must be the same on all ranks in this call. Ranks agree at every call, so it is kept by what it is made from."""
        s = replace(shape, T=0, g_dtype=shape.dtype, beta_dtype=shape.dtype)
        return self._known_terms.get(
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


def _attempt(work: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    """The result, or the exception that the other ranks must hear of before it is raised."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for word
        return None, error
