"""The distribution of sequences over ranks: which rank holds which tokens."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kda_core.errors import ArgumentError
from kda_cp.arguments import non_negative_ints, positive_int


@dataclass(frozen=True, order=True)
class Fragment:
    """Tokens [start, stop) of one sequence on one rank.

    Attributes:
        rank: the rank that holds the tokens.
        sequence: number of the sequence.
        start, stop: token range, counted from the first token of the sequence.
    """

    rank: int
    sequence: int
    start: int
    stop: int


@dataclass(frozen=True)
class FragmentTable:
    """The fragments of packed sequences on the ranks of a group. A rank holds its fragments in the order of the table.

    Attributes:
        lengths: tokens of each sequence.
        ranks: number of ranks of the group.
        fragments: the fragments of all ranks. They contain every token of each sequence exactly once. An empty sequence has
            one empty fragment, which gives its state to a rank.

    Raises:
        ArgumentError: a number is not an integer or is negative; a rank is outside the group; a token is missing or held
            twice; or a sequence with tokens has an empty fragment.
    """

    lengths: tuple[int, ...]
    ranks: int
    fragments: tuple[Fragment, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", non_negative_ints("lengths", self.lengths))
        object.__setattr__(self, "ranks", positive_int("ranks", self.ranks))
        try:
            fragments = tuple(Fragment(*map(operator.index, astuple(f))) for f in self.fragments)
        except TypeError:
            raise ArgumentError(
                "fragments", "a sequence of Fragments with integer fields", repr(self.fragments)
            ) from None
        object.__setattr__(self, "fragments", fragments)
        for f in self.fragments:
            if not (0 <= f.rank < self.ranks and 0 <= f.sequence < len(self.lengths)):
                raise ArgumentError(
                    "fragments", f"ranks below {self.ranks}, sequences below {len(self.lengths)}", repr(f)
                )
        for n, length in enumerate(self.lengths):
            own = self.of_sequence(n)
            ends = [0, *(f.stop for f in own)]
            joined = [f.start for f in own] == ends[:-1] and ends[-1] == length and own
            if not joined or (len(own) > 1 and any(f.start >= f.stop for f in own)):
                raise ArgumentError(
                    "fragments", f"each of the {length} tokens of sequence {n} on one rank", repr(own)
                )

    # ---- common tables

    @classmethod
    def contiguous(cls, lengths: Sequence[int], ranks: int) -> FragmentTable:
        """Returns a table that cuts the packed sequences into one block per rank, in the order of ranks.

        Block sizes differ by at most one token.
        """
        return cls._blocks(lengths, ranks, range(positive_int("ranks", ranks)))

    @classmethod
    def zigzag(cls, lengths: Sequence[int], ranks: int) -> FragmentTable:
        """Returns a table that cuts the packed sequences into 2 * ranks blocks.

        Rank r holds the blocks r and 2 * ranks - 1 - r.
        """
        return cls._blocks(lengths, ranks, [*range(positive_int("ranks", ranks)), *reversed(range(ranks))])

    @classmethod
    def document_aligned(cls, lengths: Sequence[int], ranks: int) -> FragmentTable:
        """Returns a table of whole sequences. The ranks then exchange no summaries.

        Each sequence, longest first, goes to the rank with the fewest tokens.
        """
        lengths, ranks = non_negative_ints("lengths", lengths), positive_int("ranks", ranks)
        loads, owner = [0] * ranks, [0] * len(lengths)
        for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
            owner[n] = loads.index(min(loads))
            loads[owner[n]] += lengths[n]
        return cls(
            lengths, ranks, tuple(Fragment(owner[n], n, 0, length) for n, length in enumerate(lengths))
        )

    @classmethod
    def _blocks(cls, lengths: Sequence[int], ranks: int, owners: Iterable[int]) -> FragmentTable:
        """Returns a table that cuts the packed sequences into blocks of nearly equal size; `owners`: the rank of each."""
        lengths = non_negative_ints("lengths", lengths)
        owners, total = list(owners), sum(lengths)
        bounds = [total * i // len(owners) for i in range(len(owners) + 1)]
        cuts = {bound for bound, before, after in zip(bounds[1:], owners, owners[1:]) if before != after}
        found = []
        for n, (first, length) in enumerate(zip(accumulate(lengths, initial=0), lengths)):
            end = first + length
            ends = sorted({first, end, *(cut for cut in cuts if first < cut < end)})
            for start, stop in zip(ends, ends[1:] or ends):  # an empty sequence has one fragment
                block = max(i for i in range(len(owners)) if bounds[i] <= start)
                found.append(Fragment(owners[block], n, start - first, stop - first))
        return cls(lengths, ranks, tuple(found))

    # ---- queries

    def of_rank(self, rank: int) -> tuple[Fragment, ...]:
        """Returns the fragments of a rank, in the order in which the rank holds them."""
        return tuple(f for f in self.fragments if f.rank == rank)

    def of_sequence(self, sequence: int) -> tuple[Fragment, ...]:
        """Returns the fragments of a sequence, in the order of their tokens."""
        return tuple(
            sorted((f for f in self.fragments if f.sequence == sequence), key=lambda f: (f.start, f.stop))
        )

    def owned(self, rank: int) -> tuple[int, ...]:
        """Returns the sequences whose last token the rank holds, in the order of its fragments."""
        return tuple(f.sequence for f in self.of_rank(rank) if f.stop == self.lengths[f.sequence])

    @property
    def crosses(self) -> bool:
        """Whether a sequence lies on more than one rank."""
        return len({(f.sequence, f.rank) for f in self.fragments}) > len(self.lengths)

    def digest(self) -> str:
        """Returns a hash that is equal for equal tables, on every rank."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    # ---- tensors

    def shard(self, x: Tensor, rank: int) -> Tensor:
        """Returns the tokens of a rank, [1, T_rank, ...], in the order of its fragments, from x [1, T, ...].

        `x` has all sequences packed.

        Raises:
            ArgumentError: the number of tokens of `x` is wrong, or `rank` is outside the group.
        """
        if not 0 <= rank < self.ranks:
            raise ArgumentError("rank", f"an integer from 0 to {self.ranks - 1}", repr(rank))
        first = list(accumulate(self.lengths, initial=0))
        if x.dim() < 2 or x.shape[:2] != (1, first[-1]):
            raise ArgumentError("x", f"[1, {first[-1]}, ...]", str(list(x.shape)))
        own = [x[:, first[f.sequence] + f.start : first[f.sequence] + f.stop] for f in self.of_rank(rank)]
        return torch.cat(own, 1) if own else x[:, :0]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Returns x [1, T, ...] from the results of `shard` for all ranks, in the order of ranks.

        Raises:
            ArgumentError: `shards` does not contain one tensor per rank, with the tokens of that rank.
        """
        tokens = [sum(f.stop - f.start for f in self.of_rank(r)) for r in range(self.ranks)]
        if [p.shape[1] if p.dim() > 1 else None for p in shards] != tokens:
            given = str([list(p.shape) for p in shards])
            raise ArgumentError("shards", f"[1, T_rank, ...] with T_rank of {tokens}", given)
        held = [iter(p.split([f.stop - f.start for f in self.of_rank(r)], 1)) for r, p in enumerate(shards)]
        by_fragment = {f: next(held[f.rank]) for f in self.fragments}
        ordered = [by_fragment[f] for n in range(len(self.lengths)) for f in self.of_sequence(n)]
        return torch.cat(ordered, 1)
