"""Which backends and planners exist, in what state, and which one serves a call.

Discovery reads entry points once and keeps the result until `refresh`. A plugin that cannot be imported, was written
for another ABI, or drives another GPU is listed with its reason and never hides the others.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from kda_core import env
from kda_core.abi import BACKEND_ABI, compatible
from kda_core.backend import (
    BACKEND_GROUP,
    PLANNER_GROUP,
    Backend,
    BackendSpec,
    Planner,
    PlannerSpec,
    spec_problem,
)
from kda_core.contract import ProblemShape
from kda_core.errors import (
    ArgumentError,
    BackendNotFoundError,
    BackendUnavailableError,
    BackendUnsupportedError,
    NoEligibleBackendError,
    PlannerError,
)
from kda_core.recent import Recent
from kda_core.reference import SPEC as REFERENCE_SPEC

MAX_PLANS = 1024  # calls of which is remembered what was found out about them

STATUSES = ("ok", "not-installed", "broken", "abi-mismatch", "wrong-arch", "unsupported")

PUBLISHED = {  # what this project publishes, so that a missing one can be named together with its remedy
    "sm90": "pip install kda-core[sm90]",
    "sm100": "pip install kda-core[sm100]",
}


@dataclass(frozen=True)
class BackendInfo:
    """One backend as `kda_core.backends` lists it. `status` is one of `STATUSES`; `reason` explains all but "ok", and
    who stands for a backend that was `replaced`."""

    name: str
    status: str
    reason: str
    distribution: str
    version: str
    spec: BackendSpec | None

    @property
    def note(self) -> str:
        """The one of the spec, or nothing."""
        return "" if self.spec is None else self.spec.note or ""


@dataclass(frozen=True)
class _Candidate:
    """An entry point after it was imported: a spec, or a final status without one."""

    name: str
    distribution: str
    version: str
    spec: Any = None
    status: str = "ok"
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """The backend that serves a call, and the rule that chose it."""

    spec: BackendSpec
    backend: Backend
    rule: str


@dataclass(frozen=True)
class Refusal:
    """A backend that does not serve a call, and why."""

    name: str
    reason: str


_override: ContextVar[str | None] = ContextVar("kda_core_backend", default=None)


class Registry:
    """Candidates and loaded targets, behind one lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._backends: tuple[_Candidate, ...] | None = None
        self._planners: tuple[_Candidate, ...] | None = None
        self._targets: dict[str, Any] = {}
        self.plans: Recent[Any] = Recent(MAX_PLANS)
        """What `kda_core.ops` found out about calls. It depends on the candidates, hence its place: `refresh` and
        `forget_plans` put a new one here, and what a call that began before stores later lands in the old one."""

    def refresh(self) -> None:
        """Forgets everything; entry points and targets are read again when they are next needed."""
        with self._lock:
            importlib.invalidate_caches()
            self._backends = self._planners = None
            self._targets.clear()
            self.plans = Recent(MAX_PLANS)

    @contextmanager
    def replaced(self, spec: BackendSpec, backend: Backend, reason: str) -> Iterator[None]:
        """Within the block, for all threads, another spec and object stand for the installed backend of that name; where
        backends are listed, `reason` says so.

        Raises:
            BackendNotFoundError: there is none.
        """
        found = self.find(spec.name)
        with self._lock:
            before = self._backends, self._targets
            self._backends = tuple(
                replace(c, spec=spec, status="ok", reason=reason) if c is found else c
                for c in self.backends()
            )
            self._targets = self._targets | {spec.target: backend}
            self.plans = Recent(MAX_PLANS)
        try:
            yield
        finally:
            with self._lock:
                self._backends, self._targets = before
                self.plans = Recent(MAX_PLANS)

    def forget_plans(self) -> None:
        """For a planner: what it would answer has changed, so that no answer may be kept."""
        self.plans = Recent(MAX_PLANS)

    # ---- discovery

    def backends(self) -> tuple[_Candidate, ...]:
        with self._lock:
            if self._backends is None:
                own = _Candidate(REFERENCE_SPEC.name, "kda-core", _version("kda-core"), REFERENCE_SPEC)
                self._backends = (own, *_discover(BACKEND_GROUP, BackendSpec, taken={own.name: "kda-core"}))
            return self._backends

    def planners(self) -> tuple[_Candidate, ...]:
        with self._lock:
            if self._planners is None:
                self._planners = _discover(PLANNER_GROUP, PlannerSpec, taken={})
            return self._planners

    def load(self, spec: BackendSpec | PlannerSpec) -> Any:
        """The object behind `spec.target`, made once. A failure is remembered and raised again until `refresh`.

        Raises:
            BackendUnavailableError: the module, the class or its constructor failed.
        """
        with self._lock:
            if spec.target not in self._targets:
                module, _, attribute = spec.target.partition(":")
                try:
                    self._targets[spec.target] = getattr(importlib.import_module(module), attribute)()
                except Exception as error:  # noqa: BLE001 - a plugin may fail in any way
                    self._targets[spec.target] = error
            loaded = self._targets[spec.target]
        if isinstance(loaded, Exception):
            raise BackendUnavailableError(
                f"{spec.name}: {spec.target} failed to load: {_show(loaded)}"
            ) from loaded
        return loaded

    # ---- choice

    def rules(self, backend: str | None) -> tuple[str | None, ...]:
        """All outside a call that decides which of the known backends serves it; `resolve` gives equal answers where
        these are equal."""
        if backend is not None:
            return (backend,)
        if (name := _override.get()) is not None:
            return (None, name)
        return (None, None, env.KDA_BACKEND.given())

    def info(self) -> tuple[BackendInfo, ...]:
        """Every known backend, installed ones first, in the order of discovery."""
        listed = [self._info(c) for c in self.backends()]
        missing = [n for n in PUBLISHED if n not in {i.name for i in listed}]
        return (
            *listed,
            *(BackendInfo(n, "not-installed", PUBLISHED[n], f"kda-{n}", "", None) for n in missing),
        )

    def _info(self, c: _Candidate) -> BackendInfo:
        status, reason = c.status, c.reason
        if status == "ok":
            status, found = self._status(c.spec)
            reason = found or reason
        return BackendInfo(
            c.name, status, reason, c.distribution, c.version, c.spec if status != "broken" else None
        )

    def _status(self, spec: BackendSpec) -> tuple[str, str]:
        if spec.unavailable is not None:
            return "unsupported", spec.unavailable
        if not any(arch_matches(spec, arch) for arch in visible_archs()):
            return "wrong-arch", f"runs on {show_archs(spec.archs)}; here: {show_archs(visible_archs())}"
        try:
            self.load(spec)
        except BackendUnavailableError as error:
            return "broken", str(error)
        return "ok", ""

    def refusal(self, c: _Candidate, shape: ProblemShape, named: bool) -> str | None:
        """Why candidate `c` does not serve `shape`, or None if it does. `named`: the user asked for it by name."""
        if c.status != "ok":
            return f"{c.status}: {c.reason}"
        spec: BackendSpec = c.spec
        if spec.unavailable is not None:
            return f"unsupported: {spec.unavailable}"
        if not arch_matches(spec, shape.arch if shape.device_type == "cuda" else shape.device_type):
            return f"wrong-arch: runs on {show_archs(spec.archs)}, the inputs are on {_where(shape)}"
        if spec.name == REFERENCE_SPEC.name and shape.device_type != "cpu" and not named:
            return "serves GPU tensors only when named: backend='reference'"
        if missing := sorted(f.value for f in shape.features if f.value not in spec.features):
            return f"unsupported: {', '.join(missing)}"
        try:
            backend = self.load(spec)
        except BackendUnavailableError as error:
            return f"broken: {error}"
        reason = backend.can_run(shape)
        return None if reason is None else f"unsupported: {reason}"

    def resolve(self, shape: ProblemShape, backend: str | None = None) -> Choice:
        """The backend for a call: `backend`, else `use_backend`, else ``KDA_BACKEND``, else automatic.

        Raises:
            BackendNotFoundError, BackendUnavailableError, BackendUnsupportedError: a named backend cannot serve it.
            NoEligibleBackendError: nobody can; the message is the table of refusals.
        """
        for name, rule in ((backend, "backend="), (_override.get(), "use_backend")):
            if name is not None:
                return self._named(name, shape, rule)
        order = env.backend_order()
        candidates = [self.find(n) for n in order] if order else list(self.backends())
        rule = "KDA_BACKEND" if order else "automatic"
        refusals, eligible = [], []
        for c in candidates:
            reason = self.refusal(c, shape, named=bool(order))
            if reason is None:
                eligible.append(c)
            else:
                refusals.append(Refusal(c.name, reason))
        if not eligible:
            raise NoEligibleBackendError(_no_backend(shape, rule, refusals))
        best = eligible[0] if order else min(eligible, key=lambda c: (-c.spec.priority, c.name))
        return Choice(best.spec, self.load(best.spec), rule)

    def refusals(self, shape: ProblemShape, named: str | None = None) -> tuple[Refusal, ...]:
        """Every backend that would not serve `shape`, with its reason; for `kda_core.explain`."""
        found = [(c.name, self.refusal(c, shape, named=c.name == named)) for c in self.backends()]
        return tuple(Refusal(name, reason) for name, reason in found if reason is not None)

    def _named(self, name: str, shape: ProblemShape, rule: str) -> Choice:
        c = self.find(name)
        reason = self.refusal(c, shape, named=True)
        if reason is None:
            return Choice(c.spec, self.load(c.spec), rule)
        served = [
            o.name for o in self.backends() if o.name != name and self.refusal(o, shape, named=True) is None
        ]
        hint = f"; these could serve it: {', '.join(served)}" if served else ""
        kind = BackendUnsupportedError if reason.startswith("unsupported") else BackendUnavailableError
        raise kind(f"backend {name!r} (chosen by {rule}) cannot serve this call: {reason}{hint}")

    def find(self, name: str) -> _Candidate:
        """The installed backend of this name, whatever its status.

        Raises:
            BackendNotFoundError: no such backend is installed.
        """
        for c in self.backends():
            if c.name == name:
                return c
        known = ", ".join(c.name for c in self.backends())
        remedy = f"; install it with: {PUBLISHED[name]}" if name in PUBLISHED else ""
        raise BackendNotFoundError(f"backend {name!r} is not installed{remedy}; installed: {known}")

    # ---- planners

    def planner(self) -> tuple[str, Planner] | None:
        """The name and the object of the planner that is asked, or None. ``KDA_CP=0`` turns it off.

        Raises:
            PlannerError: a planner is installed but broken or of another ABI; None would hide that.
        """
        if not env.context_parallel():
            return None
        for c in self.planners():
            if c.status != "ok":
                raise PlannerError(
                    f"planner {c.name!r} ({c.distribution}) is {c.status}: {c.reason}; KDA_CP=0 turns it off"
                )
            if c.spec.unavailable is None:
                return c.name, self.load(c.spec)
        return None


REGISTRY = Registry()


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, calls of this thread or asyncio task run on backend `name`, or fail: there is no fallback.
    An explicit ``backend=`` argument goes first. The backward runs on the backend of its forward, wherever it is called; a
    forward that activation checkpointing repeats outside of the block chooses anew.

    Raises:
        ArgumentError: `name` is no string.
        BackendNotFoundError: `name` is not installed.
    """
    if not isinstance(name, str):
        raise ArgumentError("name", "the name of a backend", repr(name))
    REGISTRY.find(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


# ---- observers: how tests and tools learn which backend ran


@dataclass(frozen=True)
class Call:
    """One executed call: the backend's name, the entry ("chunk_fwd", "chunk_bwd", "recurrent_fwd"), the device type,
    and the planner's name where one executed it."""

    backend: str
    entry: str
    device_type: str
    planner: str | None = None


_observers: list[Callable[[Call], None]] = []


def notify(backend: str, entry: str, device_type: str, planner: str | None = None) -> None:
    """Tells the observers of an executed call; the arguments are the fields of `Call`."""
    for observer in tuple(_observers):
        observer(Call(backend, entry, device_type, planner))


@contextmanager
def record_calls() -> Iterator[list[Call]]:
    """Within the block, every executed call of the process is appended to the list that it yields."""
    calls: list[Call] = []
    _observers.append(calls.append)
    try:
        yield calls
    finally:
        _observers.remove(calls.append)


# ---- helpers


def visible_archs() -> tuple[Any, ...]:
    """ "cpu" and the compute capability of each visible CUDA device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(dict.fromkeys(["cpu", *(torch.cuda.get_device_capability(i) for i in range(count))]))


def show_archs(archs: Any) -> str:
    """Architectures for a message: "sm_90", "sm_100, sm_103", "cpu"."""
    names = [a if isinstance(a, str) else f"sm_{a[0]}{a[1]}" for a in archs]
    return ", ".join(sorted(names, key=lambda n: (len(n), n)))


def arch_matches(spec: BackendSpec, arch: Any) -> bool:
    """Whether a backend runs on `arch`, a compute capability or a device type."""
    return "any" in spec.archs or arch in spec.archs


def _where(shape: ProblemShape) -> str:
    return shape.device_type if shape.arch is None else f"{shape.device_type} ({show_archs([shape.arch])})"


def _no_backend(shape: ProblemShape, rule: str, refusals: list[Refusal]) -> str:
    width = max((len(r.name) for r in refusals), default=0)
    lines = [f"no backend serves this call on {_where(shape)} (choice: {rule})"]
    lines += [f"  {r.name:<{width}}  {r.reason}" for r in refusals]
    known = {r.name for r in refusals}
    if rule == "automatic":
        lines += [
            f"  {name:<{width}}  not-installed: {how}" for name, how in PUBLISHED.items() if name not in known
        ]
    if shape.device_type != "cpu":
        lines.append("  backend='reference' runs on every device, slowly, with forward and backward")
    return "\n".join(lines)


def _version(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed as a package"


def _show(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _discover(group: str, kind: type, taken: dict[str, str]) -> tuple[_Candidate, ...]:
    """The candidates of an entry-point group, sorted by name so that the order does not depend on the file system."""
    found = []
    for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.value)):
        c = _candidate(point, kind)
        if c.name in taken and c.status == "ok":
            c = _Candidate(
                c.name, c.distribution, c.version, None, "broken", f"the name is taken by {taken[c.name]}"
            )
        taken.setdefault(c.name, c.distribution)
        found.append(c)
    return tuple(found)


def _candidate(point: EntryPoint, kind: type) -> _Candidate:
    distribution = point.dist.name if point.dist else "unknown"
    version = point.dist.version if point.dist else ""
    try:
        spec = point.load()
    except Exception as error:  # noqa: BLE001 - whatever a foreign module raises while it is imported
        return _Candidate(point.name, distribution, version, None, "broken", f"{point.value}: {_show(error)}")
    if problem := spec_problem(spec, kind):
        return _Candidate(point.name, distribution, version, None, "broken", f"{point.value}: {problem}")
    if not compatible(spec.abi):
        plugin, core = (".".join(map(str, v)) for v in (spec.abi, BACKEND_ABI))
        older = spec.abi < BACKEND_ABI
        remedy = f"pip install -U {distribution}" if older else "pip install -U kda-core"
        reason = f"{distribution} {version} was written for ABI {plugin}, kda-core has {core}; {remedy}"
        return _Candidate(spec.name, distribution, version, spec, "abi-mismatch", reason)
    return _Candidate(spec.name, distribution, version, spec)
