"""How the ranks of a group agree on a call before they exchange data (`kda_cp.distributed`).

Each rank says a word of five integers, always of the same size, so that ranks that do different things still hear each other:
whether it failed, what it is about to do, in which `ContextParallel` and call, and a digest of all that must be equal. One
all-gather carries the words. A second one follows only where they differ, with the texts for the error messages.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kda_core.errors import KdaError

MAKES, CALLS, RAN = range(3)
_STEPS = ("making a ContextParallel", "calling chunk_kda", "after chunk_kda")


class RankError(KdaError, RuntimeError):
    """Another rank failed, died or did not answer, or ranks disagree; the message says which and how. Raised on every rank that
    can still be told."""


@dataclass(frozen=True)
class Terms:
    """What must be equal on all ranks, by name, in words."""

    fields: Mapping[str, str]

    @cached_property
    def digest(self) -> int:
        words = repr(sorted(self.fields.items()))
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "big")


@dataclass(frozen=True)
class Moment:
    """Where a rank is: in which step, of which instance of `ContextParallel`, in which call of it."""

    step: int
    instance: int
    call: int = 0
    tag: str | None = None

    def __str__(self) -> str:
        tagged = "" if self.tag is None else f" tagged {self.tag!r}"
        if self.step == MAKES:
            return f"ContextParallel{tagged}"
        return f"call {self.call} of ContextParallel {self.instance}{tagged}"

    @property
    def fields(self) -> dict[str, str]:
        """What differs between two moments, for an error message."""
        found = {"step": _STEPS[self.step], "tag": repr(self.tag)}
        if self.step != MAKES:
            found |= {"ContextParallel": str(self.instance), "call": str(self.call)}
        return found


class Ranks:
    """The ranks of a group, and the collectives among them.

    Attributes:
        group: a ProcessGroup, or None for the default one.
        rank, size: this rank in the group, and how many there are.
        device: of tensors that are exchanged.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        served = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        host, nccl = torch.device("cpu"), served.get("cuda") == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else host
        # Where ranks agree: on the host if the group can, else at least beside what is under way on the caller's stream.
        self._words = host if "cpu" in served else self.device
        self._aside = None if self._words == host else torch.cuda.Stream(self.device)

    def agree(self, moment: Moment, terms: Terms | None, error: Exception | None = None) -> int:
        """Raises on every rank where one has failed, is at another moment, or has other terms.

        Args:
            moment: where this rank is. With `MAKES` the instance is a number that this process has not used.
            terms: of this rank; None with `error`.
            error: with which this rank failed; it is raised here, also where other ranks cannot be told.

        Returns:
            The instance of the first rank.

        Raises:
            RankError: as above, or a rank cannot be reached.
        """
        try:
            return self._agree(moment, terms, error)
        except RankError:
            if error is not None:
                raise error  # the RankError is its context
            raise

    def _agree(self, moment: Moment, terms: Terms | None, error: Exception | None) -> int:
        digest = 0 if terms is None else terms.digest
        with contextlib.nullcontext() if self._aside is None else torch.cuda.stream(self._aside):
            word = [error is not None, moment.step, moment.instance, moment.call, digest]
            mine = torch.tensor(word, dtype=torch.int64, device=self._words)
            found = mine.new_empty(len(word) * self.size)
            with self.reached(moment):
                _all_gather_single(found, mine, group=self.group)
                told = found.view(self.size, -1).tolist()
        instance = told[0][2]
        if moment.step == MAKES:  # each rank proposes a number: that of the first is taken
            told = [[*word[:2], 0, *word[3:]] for word in told]
        if not any(failed for failed, *_ in told) and all(word == told[0] for word in told):
            return instance
        # every rank has seen the same words, so every rank is here
        said: list[Any] = [None] * self.size
        text = None if error is None else f"{type(error).__name__}: {error}"
        fields = moment.fields | dict(() if terms is None else terms.fields)
        with self.reached(moment):
            dist.all_gather_object(said, (text, str(moment), fields), group=self.group)
        if error is not None:
            raise error
        if failed := [(r, text, at) for r, (text, at, _) in enumerate(said) if text is not None]:
            words = [
                f"rank {r} failed: {text}{'' if at == str(moment) else f' (in {at})'}"
                for r, text, at in failed
            ]
            raise RankError(f"{moment}: {'; '.join(words)}")
        raise RankError(_disagreement(moment, [fields for _, _, fields in said]))

    def begin_gather(self, found: Tensor, sent: Tensor, moment: Moment) -> Callable[[], None]:
        """Begins to gather `sent` of all ranks into `found`, and gives what waits for it: on a GPU the stream does, not the
        host."""
        with self.reached(moment):
            work = _all_gather_single(found, sent, group=self.group, async_op=True)

        def wait() -> None:
            with self.reached(moment):
                work.wait()

        return wait

    @contextlib.contextmanager
    def reached(self, moment: Moment) -> Iterator[None]:
        """Around a collective: what the group raises where a rank is gone becomes a RankError."""
        try:
            yield
        except RuntimeError as error:  # gloo raises just this, NCCL a class below it
            others = [r for r in range(self.size) if r != self.rank]
            who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {others}"
            raise RankError(
                f"{moment}: rank {self.rank} cannot reach {who}, which died, left, or took longer than the timeout of the "
                "group. The group cannot be used again: start all ranks anew. If a rank is only slow, give "
                f"init_process_group a longer timeout. The group said: {error}"
            ) from error


def _disagreement(moment: Moment, fields: list[dict[str, str]]) -> str:
    """The fields that differ, with the ranks of each value. Ranks in different steps have nothing else to compare."""
    differing = []
    names = dict.fromkeys(name for f in fields for name in f)
    for name in names if len({f["step"] for f in fields}) == 1 else ("step", "tag"):
        ranks: dict[str, list[int]] = {}
        for r, f in enumerate(fields):
            ranks.setdefault(f.get(name, "none"), []).append(r)
        if len(ranks) > 1:
            values = (f"{value} on {_listed(r)}" for value, r in ranks.items())
            differing.append((name, f"{name} is {' but '.join(values)}"))
    found = {name for name, _ in differing}
    advice = ""
    if found & {"step", "ContextParallel", "tag"}:
        advice = ". All ranks must make and call the same ContextParallels in the same order"
    elif "call" in found:
        advice = ". A rank failed or skipped a call that the others finished: make a new ContextParallel on all ranks"
    return f"{moment}: ranks disagree: {'; '.join(text for _, text in differing)}{advice}"


def _listed(ranks: list[int]) -> str:
    """``rank 0``, ``ranks 0, 2 and 4 to 6``."""
    runs: list[list[int]] = []
    for r in ranks:
        if runs and r == runs[-1][1] + 1:
            runs[-1][1] = r
        else:
            runs.append([r, r])
    parts: list[str] = []
    for a, b in runs:
        parts += [f"{a} to {b}"] if b > a + 1 else [str(r) for r in range(a, b + 1)]
    *others, last = parts
    if len(ranks) == 1:
        return f"rank {last}"
    return f"ranks {', '.join(others)} and {last}" if others else f"ranks {last}"


def _all_gather_single(output: Tensor, x: Tensor, **options: Any) -> Any:
    """The collective by its name since torch 2.13, or by the one before, which warns since then."""
    single = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, single)(output, x, **options)
