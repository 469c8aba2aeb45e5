"""The ranks of a group agree on a call before they exchange data (`kda_cp.distributed`).

Each rank sends a message of five integers (`_Message`). The size is always the same, so ranks in different steps still
understand each other. One all-gather carries the messages. If the messages differ or a rank failed, a second one carries the
texts for the errors.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kda_core.errors import KdaError

Value = TypeVar("Value")


class Step(enum.IntEnum):
    """What a rank is doing."""

    CONSTRUCT = 0
    CALL = 1
    COMPLETE = 2
    SUM_STATE_GRADIENTS = 3
    BACKWARD = 4

    def __str__(self) -> str:
        return (
            "constructing a ContextParallel",
            "calling chunk_kda",
            "completing chunk_kda",
            "summing the gradients of the final states of chunk_kda",
            "running the backward of chunk_kda",
        )[self]

    @property
    def is_backward(self) -> bool:
        """Whether the step belongs to the backward of a call."""
        return self >= Step.SUM_STATE_GRADIENTS


class RankError(KdaError, RuntimeError):
    """Another rank failed, died or did not answer, or the ranks disagree. The message names the ranks and the cause.

    Every rank that can be reached raises it.
    """


@dataclass(frozen=True)
class Terms:
    """The values that must be equal on all ranks.

    Attributes:
        fields: each value as text, by its name.
    """

    fields: Mapping[str, str]

    @cached_property
    def digest(self) -> int:
        """A hash of the fields, 56 bits."""
        text = repr(sorted(self.fields.items()))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@dataclass(frozen=True)
class Position:
    """What a rank is doing, and in which call of which `ContextParallel`.

    Attributes:
        step: what the rank is doing.
        instance: number of the `ContextParallel`.
        call: number of the call of this instance, from 1; 0 while the instance is constructed. A backward has the number of its
            call.
        tag: tag of the instance.
    """

    step: Step
    instance: int
    call: int = 0
    tag: str | None = None

    def __str__(self) -> str:
        tagged = "" if self.tag is None else f" tagged {self.tag!r}"
        if self.step == Step.CONSTRUCT:
            return f"ContextParallel{tagged}"
        backward = "the backward of " if self.step.is_backward else ""
        return f"{backward}call {self.call} of ContextParallel {self.instance}{tagged}"

    @property
    def fields(self) -> dict[str, str]:
        """The texts that error messages compare between ranks, by name."""
        found = {"step": str(self.step), "tag": repr(self.tag)}
        if self.step != Step.CONSTRUCT:
            found |= {"ContextParallel": str(self.instance), "call": str(self.call)}
        return found


class _Message(NamedTuple):
    """The integers that a rank sends to agree.

    Attributes:
        failed: 1 if the rank has failed, else 0.
        step, instance, call: the `Position` of the rank.
        digest: `Terms.digest`; 0 if the rank has failed.
    """

    failed: int
    step: int
    instance: int
    call: int
    digest: int


class _Report(NamedTuple):
    """The texts that a rank sends for the error messages of all ranks.

    Attributes:
        error: the error of the rank, or None.
        position: the `Position` of the rank.
        fields: `Position.fields` and `Terms.fields`.
    """

    error: str | None
    position: str
    fields: dict[str, str]


class Ranks:
    """The ranks of a group, and collectives among them.

    Attributes:
        group: a ProcessGroup, or None for the default group.
        rank, size: this rank in the group, and the number of ranks.
        device: device of exchanged tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        host, nccl = torch.device("cpu"), backends.get("cuda") == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else host
        # Ranks agree through host memory if the group can. Otherwise they use a CUDA stream of their own, so that messages
        # do not wait for the work on the caller's stream.
        self._message_device = host if "cpu" in backends else self.device
        self._stream = None if self._message_device == host else torch.cuda.Stream(self.device)

    def agree(self, position: Position, terms: Terms | None, error: Exception | None = None) -> int:
        """Raises on every rank if a rank has failed, is at another position, or has other terms.

        Args:
            position: the position of this rank. With `Step.CONSTRUCT`, its instance is a number that this process has not
                used.
            terms: the terms of this rank; None if it failed.
            error: the error of this rank, or None. It is raised here even if other ranks cannot be reached.

        Returns:
            The instance number of rank 0.

        Raises:
            RankError: another rank has failed, ranks disagree, or a rank cannot be reached.
            Exception: `error`, if it is given.
        """
        try:
            return self._agree(position, terms, error)
        except RankError:
            if error is not None:
                raise error  # the RankError is its context
            raise

    def _agree(self, position: Position, terms: Terms | None, error: Exception | None) -> int:
        digest = 0 if terms is None else terms.digest
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            message = _Message(
                int(error is not None), int(position.step), position.instance, position.call, digest
            )
            sent = torch.tensor(message, dtype=torch.int64, device=self._message_device)
            gathered = sent.new_empty(len(message) * self.size)
            with self.rank_errors(position):
                _all_gather_single(gathered, sent, group=self.group)
                messages = [_Message(*numbers) for numbers in gathered.view(self.size, -1).tolist()]
        instance = messages[0].instance
        if position.step == Step.CONSTRUCT:  # each rank proposes a number, and all use that of rank 0
            messages = [message._replace(instance=0) for message in messages]
        if not any(message.failed for message in messages) and len(set(messages)) == 1:
            return instance
        # Every rank has the same messages, so every rank takes this path.
        text = None if error is None else f"{type(error).__name__}: {error}"
        fields = position.fields | dict(() if terms is None else terms.fields)
        reports: list[Any] = [None] * self.size
        with self.rank_errors(position):
            dist.all_gather_object(reports, _Report(text, str(position), fields), group=self.group)
        if error is not None:
            raise error
        failures = [
            f"rank {r} failed: {report.error}"
            + ("" if report.position == str(position) else f" (in {report.position})")
            for r, report in enumerate(reports)
            if report.error is not None
        ]
        if failures:
            raise RankError(f"{position}: {'; '.join(failures)}")
        raise RankError(_disagreement(position, [report.fields for report in reports]))

    def start_gather(self, gathered: Tensor, sent: Tensor, position: Position) -> Callable[[], None]:
        """Starts to gather `sent` of all ranks into `gathered`. Returns a function that waits for the result.

        On a GPU the current CUDA stream waits, not the host.

        Args:
            gathered: [size * n, ...], on `device`.
            sent: [n, ...], on `device`.
            position: the position of this rank, for errors.
        """
        with self.rank_errors(position):
            work = _all_gather_single(gathered, sent, group=self.group, async_op=True)

        def wait() -> None:
            with self.rank_errors(position):
                work.wait()

        return wait

    def sum(self, x: Tensor, position: Position) -> None:
        """Replaces `x`, on `device`, by its sum over all ranks. `position`: the position of this rank, for errors."""
        with self.rank_errors(position):
            dist.all_reduce(x, group=self.group)

    @contextlib.contextmanager
    def rank_errors(self, position: Position) -> Iterator[None]:
        """Converts the error of a collective that a rank has not joined to a RankError."""
        try:
            yield
        except RuntimeError as error:  # gloo raises this class, NCCL a subclass
            others = [r for r in range(self.size) if r != self.rank]
            missing = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {others}"
            raise RankError(
                f"{position}: rank {self.rank} cannot reach {missing}, which died, left the group, or exceeded the timeout "
                "of the group. The group cannot be used again: restart all ranks. If a rank is only slow, pass a longer "
                f"timeout to init_process_group. Error of the group: {error}"
            ) from error


class Gather:
    """A gather of tensors of equal shape from all ranks.

    Its memory is allocated before the ranks agree on a call. Otherwise one rank could run out of memory after the others have
    started to exchange data.

    Args:
        counts: number of tensors of each rank. The exchange pads all of them to the largest number.
        ranks: the ranks of the group.
        like: [...], with the shape and dtype of one tensor, and the device of the results.

    Attributes:
        own: [count, ...], the tensors of this rank, which the caller fills.
    """

    def __init__(self, counts: list[int], ranks: Ranks, like: Tensor) -> None:
        self._counts, self._ranks, self._device = counts, ranks, like.device
        most = max(counts)
        self._sent = like.new_zeros((most, *like.shape), device=ranks.device)
        self._gathered = self._sent.new_empty((len(counts) * most, *like.shape))
        self.own = self._sent[: counts[ranks.rank]]

    def start(self, position: Position) -> Callable[[], list[Tensor]]:
        """Sends `own`. Returns a function that waits for the tensors of each rank, [count, ...].

        On a GPU the current CUDA stream waits, not the host.
        """
        wait_for_group = self._ranks.start_gather(self._gathered, self._sent, position)

        def wait() -> list[Tensor]:
            wait_for_group()
            by_rank = self._gathered.unflatten(0, (len(self._counts), -1))
            return [x[:n].to(self._device) for x, n in zip(by_rank, self._counts)]

        return wait


def attempt(work: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    """Returns (result of `work`, None), or (None, its exception).

    The caller informs the other ranks before it raises the exception.
    """
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - the other ranks wait for a message in any case
        return None, error


def _disagreement(position: Position, fields: list[dict[str, str]]) -> str:
    """Returns an error message: the fields that differ, with the ranks of each value, and advice.

    Ranks in different steps have different fields, so only their step and tag are compared.
    """
    same_step = len({f["step"] for f in fields}) == 1
    names = dict.fromkeys(name for f in fields for name in f) if same_step else ("step", "tag")
    differing: dict[str, str] = {}
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, f in enumerate(fields):
            ranks_of.setdefault(f.get(name, "none"), []).append(rank)
        if len(ranks_of) > 1:
            values = (f"{value} on {_rank_list(ranks)}" for value, ranks in ranks_of.items())
            differing[name] = f"{name} is {' but '.join(values)}"
    advice = ""
    if differing.keys() & {"step", "ContextParallel", "tag"}:
        advice = ". All ranks must construct and call the same ContextParallels in the same order"
    elif "call" in differing and position.step.is_backward:
        advice = ". All ranks must run the backwards of the same calls in the same order"
    elif "call" in differing:
        advice = (
            ". A rank failed in or skipped a call that the others completed: "
            "construct a new ContextParallel on all ranks"
        )
    return f"{position}: ranks disagree: {'; '.join(differing.values())}{advice}"


def _rank_list(ranks: list[int]) -> str:
    """Returns ascending ranks as text, such as ``rank 0`` or ``ranks 0, 2 and 4 to 6``."""
    ranges: list[list[int]] = []  # [first, last]
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts: list[str] = []
    for first, last in ranges:
        texts += [f"{first} to {last}"] if last > first + 1 else map(str, range(first, last + 1))
    *others, final = texts
    if len(ranks) == 1:
        return f"rank {final}"
    return f"ranks {', '.join(others)} and {final}" if others else f"ranks {final}"


def _all_gather_single(output: Tensor, x: Tensor, **options: Any) -> Any:
    """Gathers equal tensors into one. torch 2.13 renamed the collective; the old name warns since then."""
    single = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, single)(output, x, **options)
