"""Compile-time configuration of the kernel: everything that changes machine code, and nothing else.

Shapes (B, T, N, H, HV) are dynamic and are not part of it. All fields are plain literals, because a configuration is
the key of a cache on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kda_cute.records import HEAD_DIM, Gate, GateDtype

__all__ = [
    "ARCH",
    "HALVES",
    "HEAD_DIM",
    "SPACINGS",
    "THREADS",
    "Gate",
    "GateDtype",
    "Mode",
    "PrefillConfig",
]

#: The architecture that the kernel is compiled for.
ARCH = "sm_90a"

#: Threads of a CTA with chains and groups of `kda_cute.device.intra_chunk`: three warpgroups, or 384 / (2 * chunk) groups.
THREADS = 384

#: Threads of a CTA with groups of warpgroups: four of one (`kernels.intra_chunk`), or two of two (`kernels.intra_chunk_64`).
WARPGROUP_THREADS = 512

#: `PrefillConfig.local_period` of variants with local records. A warpgroup computes such a record in the time in which its chain executes about
#: five chunks (docs/kernels/prefill.md).
LOCAL_PERIOD = 6

#: Chains help (`PrefillConfig.helps`) if groups of intra-chunk CTAs would have more than this many items each, on average, without help. With
#: at most as many, some calls of 26 us take 2 us longer with help (docs/kernels/prefill.md).
HELP_ABOVE = 2

#: CTAs of a cluster. Both have the same role, which is faster (docs/kernels/prefill.md).
CLUSTER = 2

#: The work of a launch. ``whole`` is a complete call. A call in segments has two launches: ``summarize`` runs the
#: intra-chunk stage on all chunks, keeps their records, and computes the summary of every segment; ``execute`` runs the
#: chains over these records from the true initial states of the segments. ``reverse`` and ``recompute`` are launches of a
#: backward: the intra-chunk stage again, and the chains of the backward, from the last chunk of every sequence to the first.
#: ``reverse`` needs neither states nor R. ``recompute`` computes them as well, from the states that the forward has saved every
#: 512 tokens: a chain runs forward through the chunks between two of these states, then back. ``reverse_summarize`` computes how
#: every segment acts on the gradient of a state.
Mode = Literal["whole", "summarize", "execute", "reverse", "recompute", "reverse_summarize"]

#: Tokens between the states that a forward saves for its backward. With a spacing of 64 it saves R as well.
SPACINGS = (512, 64)

#: Halves (64 columns of the state) that the chains of a mode compute: those of V, and in ``summarize`` and
#: ``reverse_summarize`` those of the transition as well.
HALVES: dict[Mode, int] = {
    "whole": 2,
    "summarize": 4,
    "execute": 2,
    "reverse": 2,
    "recompute": 2,
    "reverse_summarize": 4,
}


def by_warpgroup(chunk: int, mode: Mode) -> bool:
    """Returns whether the groups of the intra-chunk stage are warpgroups (`kernels.intra_chunk`, `kernels.intra_chunk_64`), by fields of a
    `PrefillConfig`. Where they would be slower, they are not (docs/kernels/intra-chunk.md)."""
    return mode == "whole" or (mode == "summarize" and chunk == 32)


def chains_help(chunk: int, by_warpgroups: bool, local: bool) -> bool:
    """Returns `PrefillConfig.helps`. With local records chains do not help: the loop of the intra-chunk stage then has fewer instructions
    (docs/kernels/prefill.md)."""
    return by_warpgroups and chunk == 32 and not local


def groups_of(chunk: int, by_warpgroups: bool) -> int:
    """Returns the groups of an intra-chunk CTA; ``by_warpgroups``: `PrefillConfig.by_warpgroup`."""
    return WARPGROUP_THREADS // (4 * chunk) if by_warpgroups else THREADS // (2 * chunk)


@dataclass(frozen=True)
class PrefillConfig:
    """A variant of the kernel. All other options of a call are runtime arguments.

    Attributes:
        chunk: tokens per chunk, 32 or 64.
        warpgroups: halves of V per chain CTA. 1 gives each half its own CTA, which is faster for few sequences and
            heads; 2 shares the loads of records between both halves.
        gate: form of the gate.
        unbounded: whether log decays may lie below -5, so that the columns of a block vote on split factors. False is
            the caller's promise that none does.
        gate_dtype: dtype of g.
        states: whether the kernel writes bf16 states at the start of chunks.
        serving: whether states may be in the slots of a pool, with checkpoints, and q, k, v, g and beta may be strided. The kernel then
            takes the arguments of `kda_cute.pools` too. Only in the modes ``whole``, ``summarize`` and ``execute``, and
            without ``residual``. In the last two, which also take those of `kda_cute.pools.SegmentArguments`, states are in a pool.
        residual: whether the kernel writes R in bf16, for the backward. Requires ``states`` and mode ``whole`` or ``execute``.
        saved_states: whether the kernel writes fp32 states before every 512 tokens, for the backward. Requires mode ``whole`` or
            ``execute``, without ``states`` and ``serving``.
        mode: see `Mode`. ``execute`` has no gate; ``summarize`` and ``reverse_summarize`` write no states of chunks; ``reverse`` and
            ``recompute`` always write them, the gradients of states behind chunks. The modes of a backward have chunks of 64.
        padded: whether T may exceed the end of the last packed sequence (``use_graph``). The kernel then spends no time on
            the padding. Calls without padding are faster without the option (docs/kernels/prefill.md, "What was tried").
        local: whether the CTA of a chain computes every sixth record of its queue itself (`kernels.local_records`). Long calls of many
            heads are faster so, others slower. Requires mode ``whole``, chunks of 32, two warpgroups and a bounded gate, without ``states``
            and ``saved_states``.

    Raises:
        ValueError: the kernel has no such variant.
    """

    chunk: int = 64
    warpgroups: int = 1
    gate: Gate = "bounded"
    unbounded: bool = False
    gate_dtype: GateDtype = "bfloat16"
    states: bool = False
    mode: Mode = "whole"
    padded: bool = False
    residual: bool = False
    saved_states: bool = False
    serving: bool = False
    local: bool = False

    def __post_init__(self) -> None:
        if self.chunk not in (32, 64):
            raise ValueError(f"chunk: expected 32 or 64, got {self.chunk}")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups: expected 1 or 2, got {self.warpgroups}")
        if self.gate == "softplus" and not self.unbounded:
            raise ValueError("unbounded: softplus gates are unbounded; set unbounded=True, got False")
        gate = self.gate, self.unbounded, self.gate_dtype
        if self.reads_records and gate != ("bounded", False, "bfloat16"):
            raise ValueError(
                f"mode: {self.mode!r} has no gate; leave gate, unbounded and gate_dtype at their defaults, "
                f"got {self.gate!r}, {self.unbounded} and {self.gate_dtype!r}"
            )
        if self.summarizes and self.states:
            raise ValueError(
                f"states: mode {self.mode!r} writes no states of chunks; expected False, got True"
            )
        if self.backward and (self.chunk, self.states) != (64, not self.summarizes):
            raise ValueError(
                f"mode: {self.mode!r} needs chunk=64 and states={not self.summarizes}, got chunk={self.chunk} and "
                f"states={self.states}"
            )
        if self.residual and not (self.mode in ("whole", "execute") and self.states):
            raise ValueError(
                f"residual: expected False unless mode='whole' or 'execute' and states=True, got True with "
                f"mode={self.mode!r} and states={self.states}"
            )
        if self.saved_states and (self.mode not in ("whole", "execute") or self.states or self.serving):
            raise ValueError(
                f"saved_states: expected False unless mode='whole' or 'execute', states=False and serving=False, got True with "
                f"mode={self.mode!r}, states={self.states} and serving={self.serving}"
            )
        if self.serving and (self.backward or self.residual):
            raise ValueError(
                f"serving: expected False unless mode='whole', 'summarize' or 'execute' and residual=False, got True with "
                f"mode={self.mode!r} and residual={self.residual}"
            )
        if self.mode != "whole" and self.padded:
            raise ValueError(
                f"padded: expected False in mode {self.mode!r}, whose lengths the host knows, got True"
            )
        writes_states = self.states or self.saved_states
        variant = self.mode, self.chunk, self.warpgroups, self.unbounded
        if self.local and (variant != ("whole", 32, 2, False) or writes_states):
            raise ValueError(
                f"local: expected False unless mode='whole', chunk=32, warpgroups=2 and states, saved_states and unbounded are False, got "
                f"True with mode={self.mode!r}, chunk={self.chunk}, warpgroups={self.warpgroups}, states={self.states}, "
                f"saved_states={self.saved_states} and unbounded={self.unbounded}"
            )

    @property
    def keeps_records(self) -> bool:
        """Whether every slot has a record of its own. If not, each queue has a ring of records."""
        return self.mode in ("summarize", "execute")

    @property
    def reads_records(self) -> bool:
        """Whether an earlier launch has written all records, so that the launch has no intra-chunk stage."""
        return self.mode == "execute"

    @property
    def summarizes(self) -> bool:
        """Whether the launch computes how segments act on states or their gradients, and nothing for single chunks."""
        return self.mode in ("summarize", "reverse_summarize")

    @property
    def folded(self) -> bool:
        """Whether records are folded (`kda_cute.device.intra_chunk.fold`): those of chunks of 64, except for a backward. With chunks of 32 the
        chain gains less than the intra-chunk stage loses (docs/kernels/chain.md)."""
        return self.chunk == 64 and not self.backward

    @property
    def keeps_inverse(self) -> bool:
        """Whether folded records also hold T, for R: if the launch writes R, or the launch that reads its records may."""
        return self.residual or (self.mode == "summarize" and not self.serving)

    @property
    def compact(self) -> bool:
        """Whether up to `layouts.COMPACT_SEQUENCES` packed sequences have compact slots (`kernels.schedule`). With chunks of 64, calls of
        unbounded gates would be slower (docs/kernels/prefill.md)."""
        return self.mode == "whole" and self.chunk == 32

    @property
    def by_warpgroup(self) -> bool:
        """Whether the groups of the intra-chunk stage are warpgroups. If not, the stage is that of `kda_cute.device.intra_chunk`."""
        return by_warpgroup(self.chunk, self.mode)

    @property
    def helps(self) -> bool:
        """Whether the CTAs of chains may compute first items before they become chains (`HELP_ABOVE`)."""
        return chains_help(self.chunk, self.by_warpgroup, self.local)

    @property
    def local_period(self) -> int:
        """Period P of the numbers with a local record: number n has one if ``n % P == P - 1``. 0: none has."""
        return LOCAL_PERIOD if self.local else 0

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARPGROUP_THREADS if self.by_warpgroup else THREADS

    @property
    def groups(self) -> int:
        """Groups of an intra-chunk CTA."""
        return groups_of(self.chunk, self.by_warpgroup)

    @property
    def backward(self) -> bool:
        """Whether chains run from the last chunk of a sequence to the first."""
        return self.mode in ("reverse", "recompute", "reverse_summarize")

    @property
    def step(self) -> int:
        """Direction in which a chain runs through the slots of a sequence: 1, or -1 in a backward."""
        return -1 if self.backward else 1

    @property
    def chunks_per_slot(self) -> int:
        """Chunks of a slot of `kernels.schedule`: 1; in the mode ``recompute`` those between two saved states."""
        return max(SPACINGS) // self.chunk if self.mode == "recompute" else 1

    @property
    def halves(self) -> int:
        """Halves of state columns that the chains compute (`HALVES`)."""
        return HALVES[self.mode]

    @property
    def chain_ctas(self) -> int:
        """Chain CTAs of a queue."""
        return self.halves // self.warpgroups

    @property
    def carries(self) -> int:
        """Halves of states per queue in the workspace: those that chains pass on; in the mode ``recompute`` also dS, which a
        chain keeps there while it runs forward."""
        return self.halves * (2 if self.mode == "recompute" else 1)
