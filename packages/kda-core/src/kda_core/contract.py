"""The tensor contract: what a call is, checked from metadata alone.

Symbols used in every docstring of the project:

====  =======================================================
B     batch size; 1 for packed (variable-length) calls
T     tokens a batch row; for packed calls, of all sequences
H     query/key heads
HV    value heads, a multiple of H (grouped value attention)
K, V  head dimension of queries/keys and of values
N     sequences: B, or ``len(cu_seqlens) - 1``
NT    chunks of `chunk_size` tokens, of all sequences of a row
====  =======================================================

No check reads a tensor's contents, so none waits for a GPU; the one exception is `KdaInputs.sequence_lengths`, which
reads host memory only. `kda_core.contents` reads the rest, where ``KDA_CHECK=1`` asks for it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from operator import attrgetter, sub
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kda_core.errors import ArgumentError, DeviceError, DtypeError, ShapeError, StrideError

SAFE_GATE_BOUND = (
    -5.0
)  # gates in [-5, 0] need no rescaling inside blocks of 16 tokens: e^{5*16} fits fp32 and bf16
CHUNK_SIZES = (32, 64)  # spacing of intermediate states, FLA's choices
ALIGNMENT = 16  # bytes: every tensor that a backend gets starts at a multiple, the widest access of a GPU
WORKSPACE_ALIGNMENT = 256  # bytes, on a GPU; torch gives 512 there, and 64 in host memory
FP32_MAX = torch.finfo(torch.float32).max  # factors beyond it are infinite where a kernel computes
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # of q, k, v and o
_INDEX_DTYPES = (torch.int32, torch.int64)
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_Frozen = TypeVar("_Frozen")
_Value = TypeVar("_Value")


class _Kept(Generic[_Value]):
    """`functools.cached_property` without the lock that it has before Python 3.12: one for all objects of a class, which
    a forked child would never get if another thread held it."""

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self.compute = compute

    def __get__(self, instance: Any, owner: type) -> _Value:
        value = instance.__dict__[self.compute.__name__] = self.compute(instance)
        return value


class Feature(str, Enum):
    """What a call may need of a backend. A backend is eligible only if it declares all that a call needs."""

    VARLEN = "varlen"  # packed sequences, cu_seqlens
    GVA = "gva"  # HV > H
    INITIAL_STATE = "initial_state"
    FINAL_STATE = "final_state"
    STATE_V_FIRST = "state_v_first"  # states as [V, K]
    GATE_IN_KERNEL = "gate_in_kernel"
    UNBOUNDED_GATE = "unbounded_gate"  # gates that nobody promised to lie in [-5, 0]
    BETA_SIGMOID = "beta_sigmoid"
    NEG_EIGVAL = "neg_eigval"
    QK_L2NORM = "qk_l2norm"
    INTERMEDIATE_STATES = "intermediate_states"
    PIN = "pin"  # bits independent of batch composition and of what follows
    GRAPH = "graph"  # device cu_seqlens read on the device alone: no synchronisation, CUDA-graph capture
    BACKWARD = "backward"
    RECURRENT = "recurrent"  # the decode entry
    SEGMENT_SUMMARY = (
        "segment_summary"  # no call needs it: an offer to planners, `kda_core.backend.SupportsSegments`
    )


@dataclass(frozen=True)
class KdaOptions:
    """Everything about a call that is not a tensor; FLA's names and meaning (`kda_core.chunk_kda` documents each).

    The field order is the order of the operators' arguments (`kda_core.ops`).
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
    needs_backward: bool = False
    recurrent: bool = False

    def __post_init__(self) -> None:
        if self.scale is not None and not abs(self.scale) <= FP32_MAX:
            raise ArgumentError("scale", "a finite number that fp32 can hold", repr(self.scale))
        if self.chunk_size not in CHUNK_SIZES:
            # the hint is FLA's message, which tests of its callers look for
            raise ArgumentError(
                "chunk_size",
                "32 or 64",
                repr(self.chunk_size),
                "As in FLA, `chunk_size` must be either 32 or 64",
            )
        if self.allow_neg_eigval and not self.use_beta_sigmoid_in_kernel:
            raise ArgumentError("allow_neg_eigval", "False unless use_beta_sigmoid_in_kernel=True", "True")
        self._check_gate()
        if self.return_intermediate_states and self.needs_backward:
            raise ArgumentError(
                "return_intermediate_states",
                "no input that requires grad (they bypass autograd)",
                "inputs that do",
            )
        if self.max_num_seqs is not None and not self.use_graph:
            raise ArgumentError("max_num_seqs", "None unless use_graph=True", repr(self.max_num_seqs))

    def _check_gate(self) -> None:
        bound = self.lower_bound
        if bound is None:
            if self.safe_gate and self.use_gate_in_kernel:
                raise ArgumentError(
                    "lower_bound",
                    "a number in [-5, 0) with safe_gate=True and use_gate_in_kernel=True",
                    "None",
                )
            return
        if not -FP32_MAX <= bound < 0:
            raise ArgumentError("lower_bound", "a finite number below 0", repr(bound))
        if not self.use_gate_in_kernel and not self.safe_gate:
            raise ArgumentError(
                "lower_bound",
                "None unless use_gate_in_kernel=True or safe_gate=True (g is the decay itself)",
                repr(bound),
            )
        if self.use_gate_in_kernel and self.safe_gate and bound < SAFE_GATE_BOUND:
            raise ArgumentError("lower_bound", "a number in [-5, 0) with safe_gate=True", repr(bound))

    @property
    def bounded_gate(self) -> bool:
        """Whether every gate is known to lie in [-5, 0]: by the formula, or by the caller's promise `safe_gate`, which a
        `lower_bound` below -5 makes a weaker one."""
        if self.use_gate_in_kernel:
            return self.lower_bound is not None and self.lower_bound >= SAFE_GATE_BOUND
        return self.safe_gate and (self.lower_bound is None or self.lower_bound >= SAFE_GATE_BOUND)

    def resolved(self, K: int) -> KdaOptions:
        """These options as backends see them: `scale` is a number, and `lower_bound` beside a g that is the decay itself
        has become part of the promise `safe_gate`."""
        changes: dict[str, Any] = {}
        if self.scale is None:
            changes["scale"] = K**-0.5
        if self.lower_bound is not None and not self.use_gate_in_kernel:
            changes |= {"safe_gate": self.bounded_gate, "lower_bound": None}
        return (
            _made(KdaOptions, {**self.__dict__, **changes}) if changes else self
        )  # all else has been checked


# (name, annotation, default) of every option, in order: plain values, which torch.compile can trace through
OPTION_FIELDS = tuple((f.name, str(f.type), f.default) for f in fields(KdaOptions))


@dataclass(frozen=True)
class ProblemShape:
    """What the metadata of a call tells; hashable, and all that a backend may choose or compile a kernel by.

    `arch` is the compute capability of the CUDA device that holds the inputs, or None elsewhere. `options` are
    `KdaOptions.resolved`, so `scale` is never None.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    dtype: torch.dtype  # of q, k, v and o
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    index_dtype: torch.dtype | None  # of cu_seqlens; None for fixed lengths
    has_A_log: bool
    has_dt_bias: bool
    has_initial_state: bool
    device_type: str
    arch: tuple[int, int] | None
    options: KdaOptions

    def __hash__(self) -> int:
        return self._hash

    @_Kept
    def _hash(self) -> int:
        """Kept, because every call looks up by its shape what serves it."""
        return hash(_fields_of_shape(self))

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash: another process hashes strings otherwise."""
        return {name: x for name, x in self.__dict__.items() if name != "_hash"}

    @property
    def scale(self) -> float:
        """The factor of the output, resolved."""
        return self.K**-0.5 if self.options.scale is None else self.options.scale

    @property
    def varlen(self) -> bool:
        return self.index_dtype is not None

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
        """The last two dimensions of a state."""
        return (self.V, self.K) if self.options.state_v_first else (self.K, self.V)

    @property
    def features(self) -> frozenset[Feature]:
        """All that a backend must declare to serve this call."""
        o = self.options
        needed = {
            Feature.VARLEN: self.varlen,
            Feature.GVA: self.HV > self.H,
            Feature.INITIAL_STATE: self.has_initial_state,
            Feature.FINAL_STATE: o.output_final_state,
            Feature.STATE_V_FIRST: o.state_v_first
            and (self.has_initial_state or o.output_final_state or o.return_intermediate_states),
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
        }
        return frozenset(f for f, wanted in needed.items() if wanted)


_fields_of_shape = attrgetter(*(f.name for f in fields(ProblemShape)))


@dataclass(frozen=True)
class KdaInputs:
    """The inputs of one call, validated, contiguous and aligned to `ALIGNMENT`; what a backend's `chunk_fwd` receives.

    q, k [B,T,H,K]; v [B,T,HV,V]; g [B,T,HV,K]; beta [B,T,HV]; A_log [HV]; dt_bias [HV,K]; initial_state
    [N,HV,K,V] or [N,HV,V,K]; cu_seqlens [N+1] on the inputs' device; cu_seqlens_cpu [N+1] in host memory.
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

    @property
    def options(self) -> KdaOptions:
        return self.shape.options

    def sequence_lengths(self) -> tuple[int, ...] | None:
        """The N lengths where the host knows them, else None: a device cu_seqlens without a host copy, or `use_graph`,
        under which a replay may find other contents. They are read once; an object serves one call.

        Raises:
            ArgumentError: the host copy does not begin with 0, decreases, does not end with T (at most T with `use_graph`
                and when decoding), or differs from a cu_seqlens in host memory.
        """
        return self._lengths

    @_Kept
    def _lengths(self) -> tuple[int, ...] | None:
        s = self.shape
        if self.cu_seqlens is None:
            return (s.T,) * s.N
        on_host = self.cu_seqlens.device.type == "cpu"
        if self.cu_seqlens_cpu is not None:
            lengths = lengths_of("cu_seqlens_cpu", ends := self.cu_seqlens_cpu.tolist(), s)
            if on_host:
                check_copy(self.cu_seqlens.tolist(), ends)
        elif on_host:
            lengths = lengths_of("cu_seqlens", self.cu_seqlens.tolist(), s)
        else:
            return None
        return None if s.options.use_graph and not on_host else lengths


@dataclass(frozen=True)
class KdaOutputs:
    """Where a backend writes: o [B,T,HV,V] in q's dtype; final_state (`ProblemShape.state_shape`, fp32) and
    intermediate_states ([B,NT,HV,K,V] or [B,NT,HV,V,K], bf16) where asked for, else None; workspace, uint8, at least
    the backend's `workspace_bytes`, contents arbitrary, or None where that is 0. All contiguous, aligned to
    `ALIGNMENT`, the workspace on a GPU to `WORKSPACE_ALIGNMENT`."""

    o: Tensor
    final_state: Tensor | None = None
    intermediate_states: Tensor | None = None
    workspace: Tensor | None = None


def _made(cls: type[_Frozen], values: dict[str, Any]) -> _Frozen:
    """An instance of a frozen dataclass. Its own constructor takes 1.5 us for the 11 fields of `KdaInputs`, one
    ``object.__setattr__`` each, which every call would pay; it checks nothing either."""
    made = object.__new__(cls)
    object.__setattr__(made, "__dict__", values)
    return made


@dataclass(frozen=True)
class KdaGradients:
    """Gradients with the shapes and dtypes of the inputs that they belong to; None where that input is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None


_TENSORS = tuple(f.name for f in fields(KdaInputs) if f.name != "shape")
_READ = tuple(name for name in _TENSORS if name != "cu_seqlens_cpu")


def num_chunks(lengths: tuple[int, ...], chunk_size: int) -> int:
    """Chunks of `chunk_size` tokens in sequences of these lengths."""
    return sum(-(-n // chunk_size) for n in lengths)


def intermediate_states_shape(shape: ProblemShape, nt: Any) -> tuple[Any, ...]:
    """[B, nt, HV, K, V], or [B, nt, HV, V, K] with `state_v_first`."""
    return (shape.B, nt, shape.HV, *shape.state_matrix)


def intermediate_states_count(inputs: KdaInputs) -> int:
    """NT: chunks a batch row; for packed calls of all sequences, or with `use_graph` the bound ceil(T/chunk_size)+N-1.

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
        raise ArgumentError(
            "cu_seqlens_cpu",
            "a host copy of cu_seqlens with return_intermediate_states=True (or use_graph=True)",
            "None",
        )
    return num_chunks(lengths, size)


def allocate_outputs(
    inputs: KdaInputs, workspace_bytes: int = 0, given: Sequence[Tensor | None] = (None,) * 4
) -> KdaOutputs:
    """The outputs of a call, uninitialised but for those `given` (the fields of `KdaOutputs`, in order) and for o of a
    packed decode call whose sequences may end before T: there it is zeros, as in FLA. Nothing that was not asked for is
    allocated.

    Raises:
        ArgumentError: as `intermediate_states_count`.
    """
    s = inputs.shape
    o, state, h, workspace = given
    if o is None:
        partly = s.options.recurrent and s.varlen and sum(inputs.sequence_lengths() or ()) < s.T
        # the fastest way to a tensor of this shape
        o = torch.zeros_like(inputs.v) if partly else torch.empty_like(inputs.v)
    if state is None and s.options.output_final_state:
        state = inputs.q.new_empty(s.state_shape, dtype=s.state_dtype)
    if h is None and s.options.return_intermediate_states:
        wanted = intermediate_states_shape(s, intermediate_states_count(inputs))
        h = inputs.q.new_empty(wanted, dtype=torch.bfloat16)
    if workspace is None and workspace_bytes:
        workspace = inputs.q.new_empty(workspace_bytes, dtype=torch.uint8)
    values = {"o": o, "final_state": state, "intermediate_states": h, "workspace": workspace}
    return _made(KdaOutputs, values)


# ---- validation


def lengths_of(name: str, ends: list[int], shape: ProblemShape) -> tuple[int, ...]:
    """The lengths of the sequences in a cu_seqlens with the values `ends`; `name` is what the caller calls it.

    Raises:
        ArgumentError: as `KdaInputs.sequence_lengths`.
    """
    lengths = tuple(map(sub, ends[1:], ends))
    if ends[0] != 0:
        summed = sum(ends) == shape.T and min(ends) >= 0
        raise ArgumentError(name, "a first value of 0", str(ends[0]), _CUMULATE if summed else "")
    if min(lengths) < 0:
        at = next(i for i, n in enumerate(lengths) if n < 0)
        raise ArgumentError(name, "values that never decrease", f"{ends[at]} before {ends[at + 1]} at {at}")
    may_end_early = shape.options.use_graph or shape.options.recurrent
    if ends[-1] > shape.T or (ends[-1] < shape.T and not may_end_early):
        wanted = f"a last value of {'at most ' if may_end_early else ''}T={shape.T}"
        raise ArgumentError(name, wanted, str(ends[-1]))
    return lengths


def check_copy(ends: list[int], copied: list[int]) -> None:
    """Refuses a cu_seqlens_cpu with other values than cu_seqlens.

    Raises:
        ArgumentError: names the first difference.
    """
    for at, (wanted, got) in enumerate(zip(ends, copied)):
        if wanted != got:
            raise ArgumentError("cu_seqlens_cpu", f"the values of cu_seqlens, {wanted} at {at}", str(got))


_CUMULATE = "Lengths? cu_seqlens is their cumulative sum, F.pad(lengths.cumsum(0), (1, 0))"


def describe(x: object) -> str:
    """What came, for an error message: short, whatever it is."""
    return (
        f"a tensor {list(x.shape)} of {x.dtype}"
        if isinstance(x, Tensor)
        else f"{type(x).__name__} {reprlib.repr(x)}"
    )


def _tensor(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise DtypeError(name, "a torch.Tensor", describe(x))
    return x


def _check(
    name: str,
    x: Tensor,
    shape: tuple[Any, ...],
    symbols: str,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    hint: str = "",
):
    if tuple(x.shape) != tuple(shape):
        raise ShapeError(name, f"{symbols} = {list(shape)}", str(list(x.shape)), hint)
    if x.dtype not in dtypes:
        raise DtypeError(name, " or ".join(str(d) for d in dict.fromkeys(dtypes)), str(x.dtype))
    if x.device != device:
        raise DeviceError(name, f"device {device} (that of q)", str(x.device))


def check_layout(name: str, x: Tensor) -> None:
    """Refuses what has no strides: sparse, nested and other layouts.

    Raises:
        ArgumentError: names the tensor and its layout.
    """
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        raise ArgumentError(name, "a dense tensor", kind)


def _check_order(**tensors: Tensor) -> None:
    """Refuses heads before tokens by the name of the tensor that has them; else v may be blamed for the heads of q.

    Raises:
        ShapeError: a tensor has the tokens of most others in the place of heads.
    """
    tokens = [x.shape[1] for x in tensors.values() if x.dim() > 1]
    T = max(tokens, key=tokens.count)
    for name, x in tensors.items():
        if x.dim() > 2 and x.shape[1] != T and x.shape[2] == T:
            raise ShapeError(
                name,
                f"[B, T, ...] with T={T}, as most of q, k, v, g and beta",
                str(list(x.shape)),
                f"Tokens come before heads: pass {name}.transpose(1, 2)",
            )


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def device_arch(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def problem_shape(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    *,
    options: KdaOptions,
) -> ProblemShape:
    """Checks the metadata of a call: presence, shape, dtype and device of each tensor, and nothing else of it.

    Shapes and dtypes are those of `KdaInputs`; dt_bias may also be [HV*K], A_log any shape of HV elements, and both bf16
    or fp16, which `make_inputs` brings into form.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: each names the argument, what was expected and what came.
    """
    for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
        _tensor(name, x)
    if q.dim() != 4:
        raise ShapeError("q", "[B, T, H, K], 4 dimensions", str(list(q.shape)))
    if q.dtype not in INPUT_DTYPES:
        raise DtypeError("q", " or ".join(map(str, INPUT_DTYPES)), str(q.dtype))
    if v.dim() != 4:
        raise ShapeError("v", "[B, T, HV, V], 4 dimensions", str(list(v.shape)))
    _check_order(q=q, k=k, v=v, g=g, beta=beta)
    (B, T, H, K), (HV, V), device = q.shape, v.shape[2:], q.device
    if min(B, H, K, V) < 1:
        raise ShapeError("q" if min(B, H, K) < 1 else "v", "B, H, K and V of at least 1", str([B, H, K, V]))
    if HV < H or HV % H != 0:
        raise ShapeError("v", f"a head count HV that is a multiple of H={H}", f"HV={HV}")
    gates = tuple(dict.fromkeys((torch.float32, torch.bfloat16, q.dtype)))
    wide = (torch.float64, torch.float32) if q.dtype == torch.float64 else (torch.float32,)
    _check("k", k, (B, T, H, K), "[B, T, H, K]", (q.dtype,), device)
    _check("v", v, (B, T, HV, V), "[B, T, HV, V]", (q.dtype,), device)
    _check("g", g, (B, T, HV, K), "[B, T, HV, K]", gates, device)
    _check("beta", beta, (B, T, HV), "[B, T, HV]", gates, device)

    if not options.use_gate_in_kernel:
        for name, given in {"A_log": A_log, "dt_bias": dt_bias}.items():
            if given is not None:
                raise ArgumentError(
                    name, "None unless use_gate_in_kernel=True (g is the decay itself)", describe(given)
                )
    elif A_log is None and options.lower_bound is None:
        raise ArgumentError(
            "A_log", "a tensor [HV] with use_gate_in_kernel=True and lower_bound=None", "None"
        )
    if A_log is not None:
        if _tensor("A_log", A_log).numel() != HV:
            raise ShapeError(
                "A_log", f"[HV] = [{HV}], or as many elements in another shape", str(list(A_log.shape))
            )
        _check("A_log", A_log, tuple(A_log.shape), "", wide + _HALF_DTYPES, device)
    if dt_bias is not None:
        flat = _tensor("dt_bias", dt_bias).dim() == 1
        _check(
            "dt_bias", dt_bias, (HV * K,) if flat else (HV, K), "[HV*K]" if flat else "[HV, K]",
            wide + _HALF_DTYPES, device,
        )  # fmt: skip

    N = B
    if cu_seqlens is not None:
        N = _check_cu_seqlens(_tensor("cu_seqlens", cu_seqlens), cu_seqlens_cpu, B, device)
    elif cu_seqlens_cpu is not None:
        raise ArgumentError("cu_seqlens_cpu", "None unless cu_seqlens is given", describe(cu_seqlens_cpu))
    elif options.use_graph:
        raise ArgumentError("use_graph", "False unless cu_seqlens is given", "True")
    if options.max_num_seqs is not None and options.max_num_seqs != N:
        raise ArgumentError(
            "max_num_seqs", f"the number of sequences N={N} (cu_seqlens is padded)", str(options.max_num_seqs)
        )

    state = (N, HV, V, K) if options.state_v_first else (N, HV, K, V)
    if initial_state is not None:
        symbols = "[N, HV, V, K]" if options.state_v_first else "[N, HV, K, V]"
        came, hint = tuple(_tensor("initial_state", initial_state).shape), ""
        if came == (*state[:2], state[3], state[2]):
            hint = f"Pass state_v_first={not options.state_v_first} for states of this layout"
        elif cu_seqlens is not None and came == (N + 1, *state[1:]):
            hint = _CUMULATE
        _check("initial_state", initial_state, state, symbols, wide, device, hint)

    return ProblemShape(
        B=B, T=T, H=H, HV=HV, K=K, V=V, N=N,
        dtype=q.dtype, g_dtype=g.dtype, beta_dtype=beta.dtype,
        index_dtype=None if cu_seqlens is None else cu_seqlens.dtype,
        has_A_log=A_log is not None, has_dt_bias=dt_bias is not None, has_initial_state=initial_state is not None,
        device_type=device.type, arch=device_arch(device),
        options=options.resolved(K),
    )  # fmt: skip


def make_inputs(tensors: Sequence[Tensor | None], shape: ProblemShape, *, align: bool = True) -> KdaInputs:
    """The tensors of a call (those of `KdaInputs`, in order) as a backend gets them; `shape` is their `problem_shape`.

    A strided tensor is copied, and so is one that starts off `ALIGNMENT`, as a slice of a buffer may; `align=False` is
    for tensors without memory (fake ones).

    Raises:
        ArgumentError: a tensor without strides, which metadata alone does not tell.
    """
    try:
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu = [
            x
            if x is None or (x.is_contiguous() and not (align and (x.data_ptr() or 1) % ALIGNMENT))
            else _copied(x, align)
            for x in tensors
        ]
    except RuntimeError:  # torch's word for "no strides" names no argument
        for name, x in zip(_TENSORS, tensors):
            if x is not None:
                check_layout(name, x)
        raise
    if A_log is not None and (A_log.dim() != 1 or A_log.dtype in _HALF_DTYPES):
        A_log = _widened(A_log).view(shape.HV)
    if dt_bias is not None and (dt_bias.dim() == 1 or dt_bias.dtype in _HALF_DTYPES):
        dt_bias = _widened(dt_bias).view(shape.HV, shape.K)
    values = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias,
        "initial_state": initial_state, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu, "shape": shape,
    }  # fmt: skip
    return _made(KdaInputs, values)


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _HALF_DTYPES else x


def _copied(x: Tensor, align: bool) -> Tensor:
    """`x` as a backend wants it. Without an address it is empty, or zeros that torch has not written to memory."""
    x = x.contiguous()
    return x.clone() if align and (x.data_ptr() or 1) % ALIGNMENT else x


def _check_cu_seqlens(cu_seqlens: Tensor, host: Tensor | None, B: int, device: torch.device) -> int:
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ShapeError("cu_seqlens", "[N+1] with N of at least 1", str(list(cu_seqlens.shape)))
    if B != 1:
        raise ShapeError("q", "a batch size of 1 with cu_seqlens (pack the sequences along T)", f"B={B}")
    _check("cu_seqlens", cu_seqlens, tuple(cu_seqlens.shape), "[N+1]", _INDEX_DTYPES, device)
    if host is not None:
        _check("cu_seqlens_cpu", _tensor("cu_seqlens_cpu", host), tuple(cu_seqlens.shape), "[N+1], as cu_seqlens,",
               _INDEX_DTYPES, torch.device("cpu"))  # fmt: skip
    return cu_seqlens.shape[0] - 1


def check_outputs(inputs: KdaInputs, outputs: KdaOutputs, workspace_bytes: int = 0) -> None:
    """Checks tensors that a caller gave to be written: shape, dtype, device, contiguity.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ArgumentError: `out` or `workspace` does not fit.
    """
    s, device = inputs.shape, inputs.q.device
    wanted: list[tuple[str, Tensor | None, bool, Any, torch.dtype, str]] = [
        ("out[0] (o)", outputs.o, True, (s.B, s.T, s.HV, s.V), s.dtype, "[B, T, HV, V]"),
        ("out[1] (final_state)", outputs.final_state, s.options.output_final_state, s.state_shape, s.state_dtype,
         "[N, HV, V, K]" if s.options.state_v_first else "[N, HV, K, V]"),
    ]  # fmt: skip
    if s.options.return_intermediate_states or outputs.intermediate_states is not None:
        h_shape = intermediate_states_shape(s, intermediate_states_count(inputs))
        wanted.append(("out[2] (h)", outputs.intermediate_states, s.options.return_intermediate_states, h_shape,
                       torch.bfloat16, "[B, NT, HV, V, K]" if s.options.state_v_first else "[B, NT, HV, K, V]"))  # fmt: skip
    for name, x, needed, shape, dtype, symbols in wanted:
        if not needed and x is not None:
            raise ArgumentError(name, "None, for this call does not ask for it", describe(x))
        if needed:
            _check(name, _tensor(name, x), shape, symbols, (dtype,), device)
            if not x.is_contiguous():  # type: ignore[union-attr]
                raise StrideError(name, "a contiguous tensor", f"strides {list(x.stride())}")  # type: ignore[union-attr]
    if (w := outputs.workspace) is not None:
        if w.dtype != torch.uint8 or w.dim() != 1 or not w.is_contiguous():
            raise ArgumentError(
                "workspace", "a contiguous 1-D uint8 tensor", f"{describe(w)}, strides {list(w.stride())}"
            )
        if w.device != device:
            raise DeviceError("workspace", f"device {device} (that of q)", str(w.device))
        if w.numel() < workspace_bytes:
            raise ShapeError("workspace", f"at least {workspace_bytes} bytes", f"{w.numel()} bytes")


def check_memory(inputs: KdaInputs, outputs: KdaOutputs) -> None:
    """Refuses outputs that share memory with an input or with one another, for kernels read while they write; and
    outputs that are not aligned.

    Raises:
        ArgumentError: names the tensor, and the one it shares memory with.
    """
    wide = ALIGNMENT if inputs.shape.device_type == "cpu" else WORKSPACE_ALIGNMENT
    written = (
        ("out[0] (o)", outputs.o, ALIGNMENT),
        ("out[1] (final_state)", outputs.final_state, ALIGNMENT),
        ("out[2] (h)", outputs.intermediate_states, ALIGNMENT),
        ("workspace", outputs.workspace, wide),
    )
    mine = []  # (first byte, end, name)
    for name, x, wanted in written:
        if x is not None and (size := x.nbytes):
            first = x.data_ptr()
            if past := first % wanted:
                raise ArgumentError(
                    name, f"memory that starts at a multiple of {wanted} bytes", f"{past} bytes past one"
                )
            mine.append((first, first + size, name))
    spans = list(mine)
    for name in _READ:
        if (x := getattr(inputs, name)) is not None and (size := x.nbytes):
            spans.append(((first := x.data_ptr()), first + size, name))
    for i, (first, end, name) in enumerate(mine):
        for first2, end2, other in spans[i + 1 :]:
            if first < end2 and first2 < end:
                raise ArgumentError(
                    name, f"memory of its own, not shared with {other}", "overlapping tensors"
                )
