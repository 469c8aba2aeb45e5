"""The backward of a call over several ranks, on one of them (`kda_cp.distributed`).

1. Each rank computes the gradients of the states at the starts of its fragments (`kda_cp.fragment_gradients`).
2. The ranks exchange them: K x V numbers per fragment and value head, for any length.
3. Each rank merges them from behind, with the transitions of the forward, and runs the backward of its fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core import buffers, registry
from kda_core.contract import KdaGradients, ProblemShape, Tensors
from kda_cp.agreement import Gather, Position, Ranks, Step, Terms, attempt
from kda_cp.fragment_gradients import FragmentGradients, ReservedGradients
from kda_cp.fragments import Fragment, FragmentTable


class Kept(NamedTuple):
    """What a forward keeps for its backward besides the inputs.

    Attributes:
        starts: the true states at the starts of the fragments of this rank, [n, HV, K, V].
        transitions: M of `FragmentGradients.transitions`, [n, HV, K, K].
    """

    starts: Tensor
    transitions: Tensor


@dataclass(frozen=True)
class CompletedCall:
    """A call, as its backward needs it. It holds no tensor.

    Attributes:
        shape: shape of the inputs of the rank.
        plan: the backward of its fragments; None on a rank without fragments, and for a call that needs no backward.
        position: the position of the call.
    """

    shape: ProblemShape
    plan: FragmentGradients | None
    position: Position


class _Local(NamedTuple):
    """A backward before the exchange.

    Attributes:
        fragments: the backward of this rank's fragments; None on a rank without fragments.
        grad_o: [1, T_rank, HV, V].
        ends: gradients of the states at the ends of the fragments, [n, HV, K, V]; zeros where another fragment follows.
        starts: gradients of the states at the starts of the late fragments, [n, HV, K, V], to exchange.
    """

    fragments: ReservedGradients | None
    grad_o: Tensor
    ends: Tensor
    starts: Gather


class RankBackward:
    """The backward of one call on one rank.

    Args:
        ranks: the ranks of the group.
        table: the distribution of the tokens.
        call: the call.
        tensors: its floating-point inputs by name, without the initial states.
        kept: what the call has kept.
        wanted: names of the inputs that need a gradient.
    """

    def __init__(
        self,
        ranks: Ranks,
        table: FragmentTable,
        call: CompletedCall,
        tensors: dict[str, Any],
        kept: Kept,
        wanted: Sequence[str],
    ) -> None:
        self._ranks, self._table, self._own = ranks, table, table.of_rank(ranks.rank)
        self._call, self._tensors, self._kept, self._wanted = call, tensors, kept, wanted
        self._position = replace(call.position, step=Step.BACKWARD)
        self._local: _Local

    def start(
        self, grad_o: Tensor | None, grad_final: Tensor | None, terms: Terms | None, sums: bool
    ) -> None:
        """Computes the gradients of the states at the starts of this rank's fragments. Afterwards no rank has failed.

        Args:
            grad_o: gradient of o, or None for zeros.
            grad_final: gradient of the final states, or None for zeros.
            terms: the terms of the call; None if the ranks do not agree on it.
            sums: whether every rank has copies of all final states. Their gradients are added.
        """
        if sums:
            grad_final = self._sum_of_copies(grad_final, terms)
        local, error = attempt(lambda: self._start(grad_o, grad_final))
        if terms is not None:
            self._ranks.agree(self._position, None if local is None else terms, error)
        if local is None:
            assert error is not None
            raise error
        self._local = local

    def finish(self) -> dict[str, Tensor]:
        """Exchanges the gradients of states. Returns the gradients of this rank's inputs by name, in their shapes and dtypes."""
        fragments, grad_o, ends, _ = self._local
        starts = self._exchange()
        found = None
        if fragments is not None:
            plan = fragments.plan
            plan.merge(ends, starts, dict(zip(plan.transitions, self._kept.transitions.unbind())))
            found = fragments.gradients(grad_o, ends)
            registry.notify(plan.backend, "chunk_bwd", grad_o.device.type, "cp.distributed")
        return {name: self._gradient(name, found) for name in self._wanted}

    def _sum_of_copies(self, given: Tensor | None, terms: Terms | None) -> Tensor:
        """Returns the gradients of the final states of the sequences that end on this rank, [owned, HV, ...].

        Args:
            given: the gradients of this rank's copies of all final states, [N, HV, ...], or None for zeros.
        """
        total, error = attempt(lambda: self._copies(given))
        position = replace(self._position, step=Step.SUM_STATE_GRADIENTS)
        self._ranks.agree(position, None if total is None else terms, error)
        assert total is not None  # else `agree` has raised
        self._ranks.sum(total, position)
        owned = self._table.owned(self._ranks.rank)
        return torch.stack([total[n] for n in owned]) if owned else total[:0]

    def _copies(self, given: Tensor | None) -> Tensor:
        """Returns `given` or zeros, in memory that the ranks may add to."""
        s = self._call.shape
        size = (len(self._table.lengths), s.HV, *s.state_matrix)
        x = torch.zeros(size, dtype=s.state_dtype, device=self._ranks.device)
        return x if given is None else x.copy_(given)

    def _start(self, grad_o: Tensor | None, grad_final: Tensor | None) -> _Local:
        """Computes the gradients to exchange. `grad_final`: of the sequences that end on this rank, or None for zeros."""
        s, own = self._call.shape, self._own
        grad_o = torch.zeros_like(self._tensors["v"]) if grad_o is None else grad_o
        ends = torch.zeros_like(self._kept.starts)
        if grad_final is not None:
            last = [i for i, f in enumerate(own) if f.stop == self._table.lengths[f.sequence]]
            for i, given in zip(last, grad_final):
                ends[i] = given.mT if s.options.state_v_first else given
        counts = [len(self._late(r)) for r in range(self._ranks.size)]
        starts = Gather(counts, self._ranks, ends.new_empty(()).expand(s.HV, s.K, s.V))
        if self._call.plan is None:
            return _Local(None, grad_o, ends, starts)
        inputs = buffers.make_inputs(Tensors(**self._tensors, initial_state=None), s)
        fragments = self._call.plan.reserve(inputs, self._kept.starts, self._wanted)
        grad_o = buffers.aligned(grad_o)
        if (found := fragments.state_gradients(grad_o, ends)) is not None:
            starts.own.copy_(found)
        return _Local(fragments, grad_o, ends, starts)

    def _exchange(self) -> dict[Fragment, Tensor]:
        """Returns the gradients of the states at the starts of the late fragments, [HV, K, V]: of all ranks if sequences cross."""
        rank, starts = self._ranks.rank, self._local.starts
        by_rank = {rank: starts.own.to(self._local.ends.device)}
        if self._table.crosses:
            by_rank = dict(enumerate(starts.start(self._position)()))
        return {f: x for r, own in by_rank.items() for f, x in zip(self._late(r), own)}

    def _late(self, rank: int) -> list[Fragment]:
        """Returns the fragments of a rank that do not hold the starts of their sequences."""
        return [f for f in self._table.of_rank(rank) if f.start > 0]

    def _gradient(self, name: str, found: KdaGradients | None) -> Tensor:
        """Returns the gradient of an input. `found`: those of the fragments, or None on a rank without fragments."""
        s, own = self._call.shape, None if found is None else getattr(found, name)
        if name != "initial_state":
            x = self._tensors[name]
            return torch.zeros_like(x) if own is None else own.reshape(x.shape).to(x.dtype)
        size = (len(self._table.lengths), s.HV, *s.state_matrix)
        gradient = self._kept.starts.new_zeros(size)
        for i, f in enumerate(self._own):
            if f.start == 0 and own is not None:
                gradient[f.sequence] = own[i].mT if s.options.state_v_first else own[i]
        return gradient
