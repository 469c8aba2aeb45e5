"""The tensor contract: the dataclasses that describe a call.

Symbols in every docstring of the project:

====  =======================================================
B     batch size; 1 for packed (variable-length) calls
T     tokens of a batch row; for packed calls, of all sequences
H     query/key heads
HV    value heads, a multiple of H (grouped value attention)
K, V  head dimension of queries/keys and of values
N     sequences: B, or ``len(cu_seqlens) - 1``
NT    chunks of `chunk_size` tokens, of all sequences of a row
====  =======================================================

`kda_core.validate` checks the metadata of a call, `kda_core.buffers` copies and allocates tensors, and `kda_core.contents`
checks values (``KDA_CHECK=1``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from itertools import accumulate
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kda_core.errors import ArgumentError
from kda_core.offsets import check_copy, lengths_of

SAFE_GATE_BOUND = -5.0
"""Gates in [-5, 0] need no rescaling inside blocks of 16 tokens, because e^(5*16) is finite in fp32 and bf16."""
CHUNK_SIZES = (32, 64)
"""Spacing of intermediate states in tokens; FLA's choices."""
ALIGNMENT = 16
"""Bytes. Every tensor that a backend receives starts at a multiple of this, the widest access of a GPU."""
WORKSPACE_ALIGNMENT = 256
"""Bytes. A workspace on a GPU starts at a multiple of this. torch allocates at 512 on a GPU, and at 64 in host memory."""
FP32_MAX = torch.finfo(torch.float32).max
"""The largest scale and the largest magnitude of lower_bound: larger ones are infinite in the kernels."""
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes of q, k, v and o."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
"""The 16-bit dtypes. States are saved in bf16 for the backward only if q, k and v have one of them."""
SAVED_SPACING = 512
"""Tokens between the states that a forward saves for the backward."""
SAVED_SPACING_DENSE = 64
"""The same with `disable_recompute`."""
CHECKPOINT_SPACING = 64
"""Checkpoints are states after a multiple of this many tokens of a sequence."""

_Frozen = TypeVar("_Frozen")
_Value = TypeVar("_Value")


class _Kept(Generic[_Value]):
    """`functools.cached_property` without a lock. Before Python 3.12 that has one lock for all objects of a class, and a
    forked child would deadlock on it if another thread of the parent held it."""

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self.compute = compute

    def __get__(self, instance: Any, owner: type) -> _Value:
        value = instance.__dict__[self.compute.__name__] = self.compute(instance)
        return value


class Feature(str, Enum):
    """What a call may need of a backend. A backend is eligible only if it declares every feature that a call needs."""

    VARLEN = "varlen"  # packed sequences, cu_seqlens
    GVA = "gva"  # HV > H
    INITIAL_STATE = "initial_state"
    FINAL_STATE = "final_state"
    STATE_V_FIRST = "state_v_first"  # states as [V, K]
    GATE_IN_KERNEL = "gate_in_kernel"
    UNBOUNDED_GATE = "unbounded_gate"  # gates that are not known to lie in [-5, 0]
    BETA_SIGMOID = "beta_sigmoid"
    NEG_EIGVAL = "neg_eigval"
    QK_L2NORM = "qk_l2norm"
    INTERMEDIATE_STATES = "intermediate_states"
    PIN = "pin"  # bits independent of batch composition and of what follows
    GRAPH = "graph"  # cu_seqlens is read on the device only: no synchronisation, CUDA-graph capture
    BACKWARD = "backward"
    RECURRENT = "recurrent"  # the decode entry
    SEGMENT_SUMMARY = "segment_summary"  # for planners, see `SupportsSegments`; no call needs it
    SAVED_STATES = "saved_states"  # for the backward, see `SupportsSavedStates`; no call needs it
    STATE_POOL = "state_pool"  # states in the slots of a pool, see `KdaPool`; without it core copies them, so no call needs it
    BF16_POOL = "bf16_pool"  # the same in bf16
    TOKEN_STATES = "token_states"  # the same with a slot for the state after every token
    CHECKPOINTS = "checkpoints"  # states inside of sequences, see `KdaCheckpoints`
    STRIDED = "strided"  # strided q, k, v, g, beta, see `KdaInputs`; without it core copies them, so no call needs it
    POOL_SEGMENTS = "pool_segments"  # segments of calls over a pool, see `KdaSegments`; without it core copies, so no call needs it
    JOURNAL = "journal"  # decoding and verification with records of tokens, see `KdaJournal`


OFFERS = frozenset(
    {
        Feature.SEGMENT_SUMMARY,
        Feature.SAVED_STATES,
        Feature.STATE_POOL,
        Feature.BF16_POOL,
        Feature.TOKEN_STATES,
        Feature.STRIDED,
        Feature.POOL_SEGMENTS,
    }
)
"""The features that no call needs. A backend that declares one offers its optional methods, or spares core a copy."""


class Tensors(NamedTuple):
    """The tensors of a call as the caller passed them; shapes as in `KdaInputs`.

    Three forms are allowed that a backend never receives: dt_bias may be [HV*K], A_log any shape of HV elements, and both
    bf16 or fp16. `kda_core.buffers.make_inputs` converts them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None


FLOAT_TENSORS = Tensors._fields[: Tensors._fields.index("cu_seqlens")]
"""Names of the tensors that have gradients."""


@dataclass(frozen=True)
class KdaOptions:
    """The options of a call, with FLA's names and meaning; `kda_core.chunk_kda` documents each.

    Raises:
        ArgumentError: a value or a combination that the contract forbids.
    """

    scale: float | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    disable_recompute: bool = False
    return_intermediate_states: bool = False
    state_v_first: bool = False
    use_graph: bool = False
    max_num_seqs: int | None = None
    chunk_size: int = 64
    pin: bool = False
    needs_backward: bool = False  # an input requires grad
    recurrent: bool = False  # the decode entry

    def __post_init__(self) -> None:
        if self.scale is not None and not abs(self.scale) <= FP32_MAX:
            raise ArgumentError("scale", "a finite number that fp32 can hold", repr(self.scale))
        if self.chunk_size not in CHUNK_SIZES:
            # the hint is FLA's message, because tests of its callers match it
            hint = "As in FLA, `chunk_size` must be either 32 or 64"
            raise ArgumentError("chunk_size", "32 or 64", repr(self.chunk_size), hint)
        if self.allow_neg_eigval and not self.use_beta_sigmoid_in_kernel:
            raise ArgumentError("allow_neg_eigval", "False unless use_beta_sigmoid_in_kernel=True", "True")
        self._check_gate()
        if self.return_intermediate_states and self.needs_backward:
            wanted = "no input that requires grad (they bypass autograd)"
            raise ArgumentError("return_intermediate_states", wanted, "inputs that do")
        if self.max_num_seqs is not None and not self.use_graph:
            raise ArgumentError("max_num_seqs", "None unless use_graph=True", repr(self.max_num_seqs))

    def _check_gate(self) -> None:
        bound = self.lower_bound
        if bound is None:
            if self.safe_gate and self.use_gate_in_kernel:
                wanted = "a number in [-5, 0) with safe_gate=True and use_gate_in_kernel=True"
                raise ArgumentError("lower_bound", wanted, "None")
            return
        if not -FP32_MAX <= bound < 0:
            raise ArgumentError("lower_bound", "a finite number below 0", repr(bound))
        if not self.use_gate_in_kernel and not self.safe_gate:
            wanted = "None unless use_gate_in_kernel=True or safe_gate=True (g is the decay itself)"
            raise ArgumentError("lower_bound", wanted, repr(bound))
        if self.use_gate_in_kernel and self.safe_gate and bound < SAFE_GATE_BOUND:
            raise ArgumentError("lower_bound", "a number in [-5, 0) with safe_gate=True", repr(bound))

    @property
    def bounded_gate(self) -> bool:
        """Whether every gate is known to lie in [-5, 0], by the formula or by the caller's promise `safe_gate`. A
        `lower_bound` below -5 weakens that promise."""
        if self.use_gate_in_kernel:
            return self.lower_bound is not None and self.lower_bound >= SAFE_GATE_BOUND
        return self.safe_gate and (self.lower_bound is None or self.lower_bound >= SAFE_GATE_BOUND)

    def resolved(self, K: int) -> KdaOptions:
        """Returns these options as backends receive them: `scale` is a number. If g is the decay itself, `lower_bound` is
        None and `safe_gate` includes its promise."""
        changes: dict[str, Any] = {}
        if self.scale is None:
            changes["scale"] = K**-0.5
        if self.lower_bound is not None and not self.use_gate_in_kernel:
            changes |= {"safe_gate": self.bounded_gate, "lower_bound": None}
        if not changes:
            return self
        return unchecked(KdaOptions, {name: getattr(self, name) for name in OPTION_NAMES} | changes)


OPTION_NAMES = tuple(f.name for f in fields(KdaOptions))


@dataclass(frozen=True)
class PoolShape:
    """The metadata of a `KdaPool`, hashable. The number of slots, their pitch and `first_slot` are not part of it, so that they cause
    no compilation.

    Attributes:
        dtype: of the states.
        index_dtype: of all slots: int32 or int64.
        writes: whether the call writes states into the pool.
        per_token: whether the slots are [N, W], one for the state after every token, instead of [N].
        has_mask: whether the call passes `has_initial_state`.
        has_num_accepted: whether the call passes `num_accepted_tokens`.
        checkpoint_dtype: of the pool of checkpoints; None for a call without checkpoints.
    """

    dtype: torch.dtype
    index_dtype: torch.dtype
    writes: bool
    per_token: bool = False
    has_mask: bool = False
    has_num_accepted: bool = False
    checkpoint_dtype: torch.dtype | None = None

    @property
    def features(self) -> dict[Feature, bool]:
        """What a backend must declare to serve the pool itself."""
        return {
            Feature.STATE_POOL: True,
            Feature.BF16_POOL: torch.bfloat16 in (self.dtype, self.checkpoint_dtype),
            Feature.TOKEN_STATES: self.per_token,
            Feature.CHECKPOINTS: self.checkpoint_dtype is not None,
        }


@dataclass(frozen=True)
class JournalShape:
    """The metadata of a `KdaJournal`, hashable. Since ABI 2.5.

    Attributes:
        length: `KdaJournal.length`.
        rows: R, the rows of a slot in its tensors.
        has_spans: whether slots may have records before the call. False: the call verifies drafts, and never writes to the pool.
    """

    length: int
    rows: int
    has_spans: bool


@dataclass(frozen=True)
class ProblemShape:
    """The metadata of a call, hashable. A backend chooses and compiles kernels from nothing else.

    Attributes:
        B, T, H, HV, K, V, N: sizes, see `kda_core.contract`.
        dtype: of q, k, v and o.
        g_dtype, beta_dtype: of g and beta.
        index_dtype: of cu_seqlens; None for fixed lengths.
        has_A_log, has_dt_bias, has_initial_state: whether the call passes that tensor.
        device_type: such as "cuda" or "cpu".
        arch: compute capability of the CUDA device of the inputs; None on other devices.
        options: `KdaOptions.resolved`, so `scale` is a number.
        pool: of a call whose states are in a pool, else None. Such a call has no `initial_state`, and asks for a `final_state` only if
            it does not write to the pool. Since ABI 2.3. Calls of `SupportsSegments` over a pool have both, see there.
        journal: of a call with a `KdaJournal`, else None. Such a call has a pool, fixed lengths and `KdaOptions.recurrent`; T is 0 for
            `SupportsJournal.journal_fold`. Since ABI 2.5.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    dtype: torch.dtype
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    index_dtype: torch.dtype | None
    has_A_log: bool
    has_dt_bias: bool
    has_initial_state: bool
    device_type: str
    arch: tuple[int, int] | None
    options: KdaOptions
    pool: PoolShape | None = None
    journal: JournalShape | None = None

    def __hash__(self) -> int:
        return self._hash

    @_Kept
    def _hash(self) -> int:
        """The hash, computed once, because backends look up by shape in every call."""
        return hash(_fields_of_shape(self))

    def __getstate__(self) -> dict[str, Any]:
        """Pickles without the hash, because another process hashes strings differently."""
        return {name: x for name, x in self.__dict__.items() if name != "_hash"}

    @property
    def scale(self) -> float:
        """The factor of the output, resolved."""
        return self.K**-0.5 if self.options.scale is None else self.options.scale

    @property
    def varlen(self) -> bool:
        """Whether the call is packed: it passes cu_seqlens."""
        return self.index_dtype is not None

    @property
    def may_end_early(self) -> bool:
        """Whether ``cu_seqlens[-1]`` may be below T."""
        return self.options.use_graph or self.options.recurrent

    @property
    def state_dtype(self) -> torch.dtype:
        """fp32; fp64 for fp64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[N, HV, K, V], or [N, HV, V, K] with `state_v_first`."""
        return (self.N, self.HV, *self.state_matrix)

    @property
    def state_matrix(self) -> tuple[int, int]:
        """[K, V], or [V, K] with `state_v_first`."""
        return (self.V, self.K) if self.options.state_v_first else (self.K, self.V)

    @property
    def is_concrete(self) -> bool:
        """Whether all sizes are numbers, and not symbols of a trace."""
        return all(type(n) is int for n in (self.B, self.T, self.H, self.HV, self.K, self.V, self.N))

    @property
    def saved_spacing(self) -> int:
        """Tokens between two saved states (`KdaOutputs.saved_states`)."""
        return SAVED_SPACING_DENSE if self.options.disable_recompute else SAVED_SPACING

    @property
    def saved_states_shape(self) -> tuple[int, int, int, int]:
        """[slots, HV, K, V], also with `state_v_first`: ``B * ceil(T/spacing)`` slots, or ``T//spacing + N`` in a packed call.
        `saved_slots` has their order. The host need not know the lengths."""
        spacing = self.saved_spacing
        slots = self.T // spacing + self.N if self.varlen else self.B * -(-self.T // spacing)
        return (slots, self.HV, self.K, self.V)

    @property
    def saved_states_dtype(self) -> torch.dtype:
        """fp32, or bf16 with `KdaOptions.disable_recompute`. In the default mode a backward computes 512 tokens from each
        state, so a rounding of that state would affect all their gradients."""
        return torch.bfloat16 if self.options.disable_recompute else torch.float32

    @property
    def saved_bytes(self) -> int:
        """Bytes of `KdaOutputs.saved_states` and `KdaOutputs.residual` of a call that saves them."""
        residual = self.B * self.T * self.HV * self.V if self.options.disable_recompute else 0
        states = math.prod(self.saved_states_shape) * self.saved_states_dtype.itemsize
        return states + residual * torch.bfloat16.itemsize

    @_Kept
    def features(self) -> frozenset[Feature]:
        """The features that a backend must declare to serve this call. They do not depend on T."""
        o = self.options
        needed = {
            Feature.VARLEN: self.varlen,
            Feature.GVA: self.HV > self.H,
            Feature.INITIAL_STATE: self.has_initial_state,
            Feature.FINAL_STATE: o.output_final_state,
            Feature.STATE_V_FIRST: o.state_v_first
            and (
                self.has_initial_state
                or o.output_final_state
                or o.return_intermediate_states
                or self.pool is not None
            ),
            Feature.GATE_IN_KERNEL: o.use_gate_in_kernel,
            Feature.UNBOUNDED_GATE: not o.bounded_gate,
            Feature.BETA_SIGMOID: o.use_beta_sigmoid_in_kernel,
            Feature.NEG_EIGVAL: o.allow_neg_eigval,
            Feature.QK_L2NORM: o.use_qk_l2norm_in_kernel,
            Feature.INTERMEDIATE_STATES: o.return_intermediate_states,
            Feature.PIN: o.pin,
            Feature.GRAPH: o.use_graph,
            Feature.BACKWARD: o.needs_backward,
            Feature.RECURRENT: o.recurrent,
            Feature.JOURNAL: self.journal is not None,
        }
        if self.pool is not None:
            needed |= self.pool.features
        return frozenset(f for f, wanted in needed.items() if wanted)


_fields_of_shape = attrgetter(*(f.name for f in fields(ProblemShape)))
besides_tokens: Callable[[ProblemShape], tuple[Any, ...]] = attrgetter(
    *(f.name for f in fields(ProblemShape) if f.name != "T")
)
"""Returns the values of all fields but T: for the keys of caches that round T, because in serving nearly every call has a new one."""


@dataclass(frozen=True)
class KdaCheckpoints:
    """The states inside of sequences that a call stores. Since ABI 2.3.

    Sequence n stores its state after ``positions[i]`` of its tokens in slot ``indices[i]``, for i in [cu[n], cu[n+1]). Ignored are
    positions that are not a positive multiple of `CHECKPOINT_SPACING`, that exceed the length of the sequence, or that do not
    exceed all earlier positions of the sequence; slots outside of [`KdaPool.first_slot`, slots); and sequences that are skipped. cu is
    clamped to [0, C].

    Attributes:
        states: as `KdaPool.states`, and maybe the same tensor.
        cu: [N+1] int32.
        positions: [C] int32.
        indices: [C], dtype of `KdaPool.read`.
    """

    states: Tensor
    cu: Tensor
    positions: Tensor
    indices: Tensor


@dataclass(frozen=True)
class KdaPool:
    """The slots of a pool that a call reads and writes. All tensors are on the device of q, and only the device reads them. Since
    ABI 2.3.

    A slot is valid if it is in [first_slot, slots). A sequence without any valid slot is skipped: its rows of o are zeros, and nothing
    else of it is read or written. If only the read slot is not valid, the sequence starts from zeros. If only the write slot is not
    valid, its final state is dropped. A state is converted to fp32 (fp64 for fp64 inputs) when it is read, and rounded to nearest
    when it is written.

    Attributes:
        states: [slots, HV, K, V], or [slots, HV, V, K] with `state_v_first`; fp32, bf16, or fp64 for fp64 inputs. A slot is
            contiguous; the stride between slots is any multiple of `ALIGNMENT` bytes, and may exceed 2^31 elements in total.
        read: [N] int32 or int64, the slot from which a sequence starts; or [N, W] with `PoolShape.per_token`, where the slot of
            sequence n is ``read[n, clamp(num_accepted_tokens[n], 1, W) - 1]``, column 0 without num_accepted_tokens.
        write: [N], the slot of the final state; or [N, W], where the state after token t has slot ``write[n, t]``. The caller
            promises that no sequence then has more than W tokens: the numbers of longer ones are undefined. Only
            `PoolShape.writes` says whether the call writes.
        first_slot: the first slot of the pool that holds states.
        has_initial_state: [N] bool, or None for all True. Where it is False, the sequence starts from zeros, and its
            read slot is ignored.
        num_accepted_tokens: [N] int32, or None.
        checkpoints: or None.
    """

    states: Tensor
    read: Tensor
    write: Tensor
    first_slot: int = 0
    has_initial_state: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    checkpoints: KdaCheckpoints | None = None


@dataclass(frozen=True)
class KdaSegments:
    """Where the segments of a call over a pool lie in its sequences, for `kda_core.backend.SupportsSegments`. All tensors are
    contiguous and on the device of q, and only the device reads them. N is the number of segments. Since ABI 2.7.

    Attributes:
        sequence: [N] int32: the sequence of each segment, which is the index of its slots in the `KdaPool` of the whole call.
        before: [N] int32: the tokens of the sequence before the segment, 0 for first segments only. With checkpoints all are multiples
            of `CHECKPOINT_SPACING`.
        ends: [N] bool: whether the segment is the last one of its sequence.
    """

    sequence: Tensor
    before: Tensor
    ends: Tensor


@dataclass(frozen=True)
class KdaJournal:
    """The tokens since the state that a slot of the pool holds, as records from which the state after each of them follows. All
    tensors are contiguous, aligned to `ALIGNMENT` and on the device of q, and only the device reads them. Since ABI 2.5.

    A record of a token t is the corrected value u_t, the key k_t and the log decay G_t from the state in the pool to the token. With
    S_0 that state and m records, the state of a slot is::

        S_m = e^{G_m} S_0 + sum_j (e^{G_m - G_j} k_j) u_j^T,   u_t = beta_t (v_t - k_t^T e^{g_t} S_{t-1})

    No exponent is above 0, so any gate is served. The records of a slot are a ring buffer: record i is in row ``(first + i) % R``, with
    (first, m) the span of the slot. A call appends its tokens to them. If m + T exceeds `length`, the call first writes S_m to the
    slot of the pool (it folds), and G starts from 0. The new records are in the same rows whether or not it folds, and R is at least
    `length` + T, so they never replace a record that the call reads. `spans` does not change before
    `kda_core.serving.journal_advance`.

    Attributes:
        u: [slots, HV, R, V], fp32 (fp64 for fp64 inputs), with as many slots as the pool.
        k: [slots, H, R, K], dtype of q: k as the call received it, before the l2norm.
        k_factor: [slots, H, R], dtype of u: the factor that normalises k, ``1 / sqrt(sum(k**2) + 1e-6)``; 1 without the l2norm.
        G: [slots, HV, R, K], dtype of u: sum of the natural log decays since the state in the pool, each clamped to at least -104 (-746
            in fp64), whose exponential is 0.
        length: largest number of records of a slot; a call that would exceed it folds first.
        spans: [slots, 2] int32: first row, clamped to [0, R), and number of records, clamped to [0, `length`]. None: no slot has
            records, new ones start at row 0, and nothing is folded.
        accepted: [N] int32, clamped to [0, R]; only for `SupportsJournal.journal_fold` without spans: the number of records of each
            sequence, from row 0 on.
    """

    u: Tensor
    k: Tensor
    k_factor: Tensor
    G: Tensor
    length: int
    spans: Tensor | None = None
    accepted: Tensor | None = None


@dataclass(frozen=True)
class KdaInputs:
    """The inputs of one call as `chunk_fwd` of a backend receives them: validated, contiguous and aligned to `ALIGNMENT`.

    A backend that declares `Feature.STRIDED` (since ABI 2.3) also receives q, k, v and g whose strides of B and T are any multiples of
    `ALIGNMENT` bytes, and beta with any strides of B and T and any address. The inner dimensions are dense. The backward always
    receives contiguous tensors.

    Attributes:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV, K].
        beta: [B, T, HV].
        A_log: [HV], fp32 (or fp64 for fp64 inputs), or None.
        dt_bias: [HV, K], as A_log.
        initial_state: [N, HV, K, V] or [N, HV, V, K], or None.
        cu_seqlens: [N+1] on the device of q, or None.
        cu_seqlens_cpu: [N+1] in host memory, or None.
        shape: the metadata.
        pool: the pool that holds the states of the call, in place of `initial_state` and `KdaOutputs.final_state`; else None.
            Only backends that declare `PoolShape.features` receive it. Since ABI 2.3.
        journal: the records of a call of `SupportsJournal.journal_decode`, else None. Since ABI 2.5.
        segments: the segments of a call of `SupportsSegments` over a pool, else None. Only backends that declare
            `Feature.POOL_SEGMENTS` receive it. Since ABI 2.7.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    shape: ProblemShape
    pool: KdaPool | None = None
    journal: KdaJournal | None = None
    segments: KdaSegments | None = None

    @property
    def options(self) -> KdaOptions:
        """The options of the call, `ProblemShape.options`."""
        return self.shape.options

    def sequence_lengths(self) -> tuple[int, ...] | None:
        """Returns the N lengths if the host knows them, else None.

        The host does not know them for a device cu_seqlens without a host copy, and with `use_graph`, because a replay may
        find other contents. The values are read once; an object serves one call.

        Raises:
            ArgumentError: the values do not begin with 0, decrease, or do not end with T (at most T if
                `ProblemShape.may_end_early`); or cu_seqlens_cpu differs from a cu_seqlens in host memory.
        """
        return self._lengths

    @_Kept
    def _lengths(self) -> tuple[int, ...] | None:
        s = self.shape
        if self.cu_seqlens is None:
            return (s.T,) * s.N
        on_host = self.cu_seqlens.device.type == "cpu"
        if self.cu_seqlens_cpu is not None:
            offsets = self.cu_seqlens_cpu.tolist()
            lengths = lengths_of("cu_seqlens_cpu", offsets, s.T, may_end_early=s.may_end_early)
            if on_host:
                check_copy(self.cu_seqlens.tolist(), offsets)
        elif on_host:
            offsets = self.cu_seqlens.tolist()
            lengths = lengths_of("cu_seqlens", offsets, s.T, may_end_early=s.may_end_early)
        else:
            return None
        return None if s.options.use_graph and not on_host else lengths


def launch_tensors(inputs: KdaInputs) -> tuple[Tensor | None, ...]:
    """Returns the tensors whose addresses a `kda_core.backend.PreparedLaunch` gets, in order.

    =========  ========================================================================================================
    all calls  q, k, v, g, beta, A_log, dt_bias, initial_state (over a pool `KdaPool.states`), cu_seqlens
    pool       `KdaPool.read`, `write`, `has_initial_state`, `num_accepted_tokens`, and states, cu, positions, indices of
               `KdaPool.checkpoints`
    journal    `KdaJournal.u`, `k`, `k_factor`, `G`, `spans`
    =========  ========================================================================================================

    A call without a pool has 9, one over a pool 17, one with a journal 22.
    """
    x, pool, journal = inputs, inputs.pool, inputs.journal
    tokens = x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias
    if pool is None:
        return (*tokens, x.initial_state, x.cu_seqlens)
    kept = pool.checkpoints
    points = (None,) * 4 if kept is None else (kept.states, kept.cu, kept.positions, kept.indices)
    slots = pool.read, pool.write, pool.has_initial_state, pool.num_accepted_tokens
    found = (*tokens, pool.states, x.cu_seqlens, *slots, *points)
    if journal is None:
        return found
    return (*found, journal.u, journal.k, journal.k_factor, journal.G, journal.spans)


@dataclass(frozen=True)
class KdaOutputs:
    """The tensors that a backend writes. All are contiguous and aligned to `ALIGNMENT`.

    Attributes:
        o: [B, T, HV, V] in q's dtype.
        final_state: `ProblemShape.state_shape` in `ProblemShape.state_dtype`, or None if the call does not ask for it.
        intermediate_states: [B, NT, HV, K, V] or [B, NT, HV, V, K], bf16, or None if the call does not ask for them.
        workspace: uint8, at least as many bytes as the backend's `workspace_bytes`, contents arbitrary, aligned to
            `WORKSPACE_ALIGNMENT` on a GPU; None if the backend needs 0 bytes.
        saved_states: `ProblemShape.saved_states_shape` of `ProblemShape.saved_states_dtype`, S before every
            `ProblemShape.saved_spacing` tokens of a sequence, or None if nothing is to be saved. Chunk i of sequence n is in slot
            ``saved_slots(..)[n][i]``; other slots may stay as they are. Only backends that declare `Feature.SAVED_STATES` receive it.
            Since ABI 2.6; in ABI 2.2 to 2.5 all were bf16.
        residual: [B, T, HV, V] bf16, ``R_t = v_t - k_t^T (e^{g_t} S_t)`` with S_t the state before the token, and k and g as
            the recurrence uses them; None unless `saved_states` is given and `KdaOptions.disable_recompute` is set. Since ABI 2.2.
    """

    o: Tensor
    final_state: Tensor | None = None
    intermediate_states: Tensor | None = None
    workspace: Tensor | None = None
    saved_states: Tensor | None = None
    residual: Tensor | None = None


@dataclass(frozen=True)
class KdaGradients:
    """The gradients of the floating-point inputs, with the shapes and dtypes of `KdaInputs`; None for inputs that are
    None. Since ABI 2.2 `A_log`, `dt_bias` and `initial_state` are also None if autograd does not need their gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None


def unchecked(cls: type[_Frozen], values: dict[str, Any]) -> _Frozen:
    """Returns an instance of a frozen dataclass with these fields, without its `__post_init__`.

    The constructor of a frozen dataclass calls ``object.__setattr__`` for each field, which takes 1.5 us for the 11 fields of
    `KdaInputs`.
    """
    made = object.__new__(cls)
    if torch.compiler.is_dynamo_compiling():  # torch 2.11 does not trace an assignment of ``__dict__``
        for name, value in values.items():
            object.__setattr__(made, name, value)
    else:
        object.__setattr__(made, "__dict__", values)
    return made


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def num_chunks(lengths: tuple[int, ...], chunk_size: int) -> int:
    """Returns the number of chunks of `chunk_size` tokens in sequences of these lengths."""
    return sum(-(-n // chunk_size) for n in lengths)


def saved_slots(shape: ProblemShape, lengths: Sequence[int]) -> list[range]:
    """Returns the slots of `KdaOutputs.saved_states` of each sequence, one for each `ProblemShape.saved_spacing` tokens.

    A packed sequence that starts at token s has its first slot at ``s//spacing + n``. The slots of two sequences do not overlap,
    because ``ceil(length/spacing) <= end//spacing - s//spacing + 1``. So a kernel needs no sum over the sequences before its own.

    Args:
        lengths: of the N sequences.
    """
    spacing = shape.saved_spacing
    chunks = [-(-n // spacing) for n in lengths]
    if shape.varlen:
        starts = [s // spacing + n for n, s in enumerate(accumulate(lengths[:-1], initial=0))]
    else:
        starts = list(accumulate(chunks[:-1], initial=0))
    return [range(first, first + count) for first, count in zip(starts, chunks)]


def intermediate_states_shape(shape: ProblemShape, nt: Any) -> tuple[Any, ...]:
    """Returns [B, nt, HV, K, V], or [B, nt, HV, V, K] with `state_v_first`."""
    return (shape.B, nt, shape.HV, *shape.state_matrix)


def intermediate_states_count(inputs: KdaInputs) -> int:
    """Returns NT: the chunks of a batch row, for packed calls of all sequences, or with `use_graph` the upper bound
    ceil(T/chunk_size)+N-1.

    Raises:
        ArgumentError: a packed call whose lengths only the device knows.
    """
    s, size = inputs.shape, inputs.options.chunk_size
    if not s.varlen:
        return -(-s.T // size)
    if s.options.use_graph:
        return -(-s.T // size) + s.N - 1
    lengths = inputs.sequence_lengths()
    if lengths is None:
        wanted = "a host copy of cu_seqlens with return_intermediate_states=True (or use_graph=True)"
        raise ArgumentError("cu_seqlens_cpu", wanted, "None")
    return num_chunks(lengths, size)
