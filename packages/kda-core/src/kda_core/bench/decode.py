"""The rows of decoding: calls over pools of states, in place or with records of tokens.

A CUDA graph holds launches over different slots of a pool that is several times the L2, so that the states are not in the L2.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kda_core
from kda_core import serving
from kda_core.bench import implementations, measure, peers
from kda_core.registry import record_calls
from kda_core.testing import error, make_inputs, token_oracle

D = 128  # K and V
CHECKED = 2  # sequences of a launch that are compared with the oracle
DRAWN = 8  # different sequences of a launch; the others repeat them
VERIFY, COMMIT, JOURNAL = "+verify", "+commit", "+journal"
RECORDS = (VERIFY, COMMIT, JOURNAL)
#: Least bytes of a pool: several times the L2 of any supported GPU; on a CPU there is no need.
POOL_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
#: Records of a slot before they are folded, the default of kda_core.serving.
LENGTH = 8
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOKENS = ("q", "k", "v", "g", "beta")


FIELDS = """Fields of a row of decoding:

  call, N, HV, T, impl, state_dtype    what was measured: N sequences of T tokens
  us                    microseconds of a call
  timing                "graph", or "eager" on a CPU
  launches              calls of a graph
  variant               number of the fastest variant, where there are several
  error_o, error_state  largest relative Frobenius error over sequences and heads against the fp64 token loop, of a few sequences;
                        null where the call has none
  first_call_s          the first call, with compilation, and its check
"""


@dataclass(frozen=True)
class Launch:
    """One measured function on `launches` parts of a pool.

    Attributes:
        calls: functions without arguments, each on other slots.
        check: runs the first call and returns its ``error_o`` and ``error_state``.
        ready: prepares the memory for timing, after `check`.
    """

    calls: Sequence[Callable[[], Any]]
    check: Callable[[], dict[str, Any]]
    ready: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Problem:
    """N sequences of T tokens on a device, and slots for each launch.

    Attributes:
        tokens: arguments of ``fused_recurrent_kda``, without states; gate, l2norm and sigmoid are in the kernel.
        pool: [slots, HV, V, K], N(0,1).
        slots: [launches, N, W] int32 in random order, all different. W: slots of a sequence.
    """

    tokens: dict[str, Any]
    pool: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Case:
    """One shape of decoding: N sequences of T tokens with HV heads. Its name is "N<N>-HV<HV>-T<T>"."""

    N: int
    HV: int
    T: int

    @property
    def name(self) -> str:
        return f"N{self.N}-HV{self.HV}-T{self.T}"


def parse(name: str) -> Case | None:
    """Returns the case with this name; None if the name has another form."""
    found = re.fullmatch(r"N([1-9]\d*)-HV([1-9]\d*)-T([1-8])", name)
    return found and Case(*map(int, found.groups()))


def make_problem(
    N: int, HV: int, T: int, W: int, state_dtype: str, device: torch.device, pool_bytes: int
) -> Problem:
    """Returns a problem with at least two launches, whose slots take at least `pool_bytes`."""
    drawn = min(N, DRAWN)
    x = make_inputs("slow", T, B=drawn, H=HV, state_v_first=True, device=device).arguments
    tokens = {
        n: y.repeat(-(-N // drawn), *[1] * (y.dim() - 1))[:N] if n in TOKENS else y for n, y in x.items()
    }
    tokens["dt_bias"] = tokens["dt_bias"].flatten()
    dtype = STATE_DTYPES[state_dtype]
    launches = max(2, -(-pool_bytes // (N * W * HV * D * D * dtype.itemsize)))
    generator = torch.Generator(device).manual_seed(0)
    pool = torch.empty(launches * N * W, HV, D, D, dtype=dtype, device=device).normal_(generator=generator)
    order = torch.randperm(len(pool), generator=generator, device=device)
    return Problem(tokens, pool, order.to(torch.int32).view(launches, N, W))


def slots_of(impl: str, T: int) -> int:
    """Returns the slots of a sequence: calls of several tokens store the state after each, unless they keep records."""
    return 1 if impl.endswith(RECORDS) else T


def serves(impl: str, T: int, state_dtype: str) -> bool:
    """Returns whether an implementation has rows with T tokens of each sequence. The kernels of FlashInfer have bf16 states."""
    if impl == "flashinfer":
        return state_dtype == "bfloat16"
    return T > 1 or not impl.endswith((VERIFY, COMMIT))


def has_journal(backend: str) -> bool:
    """Returns whether the backend runs here and declares the feature ``journal``."""
    specs = {i.name: i.spec for i in kda_core.backends() if i.status == "ok"}
    spec = specs.get(backend)
    return spec is not None and "journal" in spec.features


def launch(impl: str, problem: Problem) -> Launch:
    """Returns the launches of an implementation: "fla", "flashinfer", or a backend with or without one of `RECORDS`.

    Raises:
        ValueError: the backend is unknown or cannot run on this machine.
    """
    if impl == "fla":
        # Triton compiles for each stride and alignment of the slots: rows of 8 have one
        W = problem.slots.shape[2]
        return _pooled(problem, _fla(), torch.nn.functional.pad(problem.slots, (0, 8 - W))[..., :W])
    if impl == "flashinfer":
        (N, T), device = problem.tokens["q"].shape[:2], problem.pool.device
        bounds = torch.arange(N + 1, dtype=torch.int32, device=device) * T
        return _pooled(problem, partial(peers.flashinfer(), cu_seqlens=bounds), problem.slots)
    if (reason := implementations.unavailable(impl)) is not None:
        raise ValueError(f"impl: {impl!r} cannot run here: {reason}")
    if impl.endswith(RECORDS):
        return _records(impl, problem)
    return _pooled(problem, _backend(implementations.backend_name(impl)), problem.slots)


def times(variants: Sequence[Launch], device: torch.device, repeats: int) -> dict[str, Any]:
    """Returns the fields of a row that are measured, of the fastest of the variants; see `FIELDS`."""
    found = []
    for number, launch in enumerate(variants):
        started = time.perf_counter()
        checked = launch.check()
        first = time.perf_counter() - started
        launch.ready()
        timing = "eager" if device.type == "cpu" else "graph"
        ms = {"eager": measure.eager_launch_time, "graph": measure.launch_time}[timing](launch.calls, repeats)
        found.append({
            "us": ms * 1e3, "timing": timing, "launches": len(launch.calls), "first_call_s": first,
            "variant": number if len(variants) > 1 else None,
        } | checked)  # fmt: skip
    return min(found, key=lambda row: row["us"])


# ---- states in place


def _backend(name: str) -> Callable[..., Any]:
    def call(**x: Any) -> None:
        with record_calls() as calls:
            kda_core.fused_recurrent_kda(**x, output_final_state=True, backend=name)
        assert [c.backend for c in calls] == [name], calls

    return call


def _fla() -> Callable[..., Any]:
    """Returns FLA's function below its choice among implementations, which may lead to other packages."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    return partial(inspect.unwrap(fused_recurrent_kda_fwd), inplace_final_state=True)


def _pooled(problem: Problem, function: Callable[..., Any], given: Tensor) -> Launch:
    """The states are updated in place: after the last token, or with W slots after every token. `given`: the slots that calls get."""
    x, (_, N, W) = problem.tokens, problem.slots.shape
    o = torch.empty_like(x["v"])
    call = partial(function, **x, initial_state=problem.pool, out=o)
    chosen = [slots if W > 1 else slots[:, 0] for slots in given]
    accepted = None
    if W > 1:
        accepted = (torch.arange(N, device=o.device) % W + 1).to(torch.int32)
        call = partial(call, num_accepted_tokens=accepted)

    def check() -> dict[str, Any]:
        slots = problem.slots[0, :CHECKED].long()
        first = (
            slots[:, 0] if accepted is None else slots.gather(1, accepted[:CHECKED, None].long() - 1)[:, 0]
        )
        before = problem.pool[first].clone()
        call(ssm_state_indices=chosen[0])
        return errors(x, before, o, problem.pool[slots[:, -1]])

    return Launch([partial(call, ssm_state_indices=slots) for slots in chosen], check)


def errors(x: dict[str, Any], before: Tensor, o: Tensor, after: Tensor, repeats: int = 1) -> dict[str, Any]:
    """Returns the errors of the first `CHECKED` sequences against the fp64 oracle, which takes the tokens `repeats` times; o is that of
    the last time."""
    n = len(before)
    own: dict[str, Any] = {
        name: torch.cat([y[:n]] * repeats, 1) if name in TOKENS else y for name, y in x.items()
    }
    want_o, want_state = token_oracle(**own, initial_state=before)
    want_o = want_o[:, -o.shape[1] :]
    return {"error_o": error(o[:n], want_o), "error_state": error(after, want_state, state=True)}


# ---- records of tokens in place of states


def _records(impl: str, problem: Problem) -> Launch:
    """Calls that keep records (`kda_core.serving`). The spans of `JOURNAL` are those of sequences in random phases: from 1 to `LENGTH`
    records, so that T calls in `LENGTH` fold. No call changes them, so every replay does the same work. `COMMIT` accepts all drafts."""
    commits = impl.endswith(COMMIT)
    verifies = commits or impl.endswith(VERIFY)
    backend = implementations.backend_name(impl)
    x, pool = {n: y for n, y in problem.tokens.items() if n != "state_v_first"}, problem.pool
    T, slots = x["v"].shape[1], problem.slots.squeeze(-1)
    # the rows are length + drafts: verification has no records before its tokens
    journal = serving.Journal.allocate(
        len(pool), pool.shape[1], D, D, length=1 if verifies else LENGTH, drafts=max(T - 1, 1) if verifies else T,
        state_v_first=True, dtype=x["q"].dtype, device=pool.device,
    )  # fmt: skip
    o = torch.empty_like(x["v"])
    function = (
        partial(serving.verify_kda, records=journal)
        if verifies
        else partial(serving.journal_decode_kda, journal=journal)
    )

    accepted = torch.full_like(slots[0], T)

    def run(slots: Tensor) -> None:
        with record_calls() as calls:
            function(**x, pool=pool, slots=slots, out=o, backend=backend)
        assert [c.backend for c in calls] == [backend], calls
        if commits:
            serving.journal_fold(pool, slots, journal, accepted=accepted, backend=backend)

    def check() -> dict[str, Any]:
        first = slots[0]
        at, steps = first[:CHECKED].long(), 1 if verifies else LENGTH + 1  # the last one folds
        before = pool[at].clone()
        for _ in range(steps):
            run(first)
            if not verifies:
                serving.journal_advance(journal, first, T, T)
        if not commits:
            which: dict[str, Any] = {"accepted": accepted} if verifies else {}
            serving.journal_fold(pool, first, journal, backend=backend, **which)
        return errors(problem.tokens, before, o, pool[at], steps)

    def ready() -> None:
        journal.u.normal_()
        journal.k.normal_()
        journal.k_factor.fill_(D**-0.5)
        journal.G.zero_()
        spans = journal.spans
        spans[:, 0].random_(0, journal.u.shape[2])
        spans[:, 1].random_(1, LENGTH + 1)

    return Launch([partial(run, s) for s in slots], check, ready)
