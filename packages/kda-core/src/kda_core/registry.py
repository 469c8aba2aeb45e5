"""The backend registry: which backends and planners exist, their status, and which backend serves a call.

Discovery reads entry points once and keeps the result until `Registry.refresh`. A plugin that cannot be imported, was written
for another ABI or runs on another GPU is listed with its reason and never affects the others.
"""

from __future__ import annotations

import difflib
import importlib
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from kda_core import env, install
from kda_core.backend import (
    BACKEND_GROUP,
    PLANNER_GROUP,
    Arch,
    Backend,
    BackendSpec,
    Planner,
    PlannerSpec,
    least_capability,
)
from kda_core.contract import ProblemShape
from kda_core.discovery import (
    FAILURES,
    Candidate,
    discover,
    entry_points,
    forget_entry_points,
    installed_version,
    published_backends,
)
from kda_core.errors import (
    ArgumentError,
    BackendNotFoundError,
    BackendUnavailableError,
    BackendUnsupportedError,
    NoEligibleBackendError,
    PlannerError,
)
from kda_core.fla import SPEC as FLA_SPEC
from kda_core.fla import is_installed as fla_is_installed
from kda_core.plugin_checks import show_error, shown, target_problem
from kda_core.reference import SPEC as REFERENCE_SPEC

STATUSES = ("ok", "not-installed", "broken", "abi-mismatch", "wrong-arch", "unsupported")

FORK_WAIT_S = 10.0
"""Seconds that a fork waits for another thread that loads plugins."""


@dataclass(frozen=True)
class BackendInfo:
    """One backend as `kda_core.backends` lists it.

    Attributes:
        name: what users pass as ``backend=``.
        status: one of `STATUSES`.
        reason: explains every status but "ok", and says what replaced a backend (`Registry.replaced`).
        distribution, version: of the package; empty strings if unknown.
        spec: None if it cannot be read.
    """

    name: str
    status: str
    reason: str
    distribution: str
    version: str
    spec: BackendSpec | None

    @property
    def note(self) -> str:
        """The note of the spec, or an empty string."""
        return "" if self.spec is None else self.spec.note or ""


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


@dataclass(frozen=True)
class _Failure:
    """Takes the place of the object of a spec's target that failed to load."""

    reason: str
    cause: BaseException | None


_override: ContextVar[str | None] = ContextVar("kda_core_backend", default=None)
override = _override.get
"""Returns the backend of the innermost `use_backend`, or None."""


class Registry:
    """Candidates and loaded targets, guarded by one lock.

    Attributes:
        generation: a number that changes whenever answers of the registry, of backends or of planners may have changed. What
            is computed from them is cached together with it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._backends: tuple[Candidate, ...] | None = None
        self._planners: tuple[Candidate, ...] | None = None
        self._targets: dict[BackendSpec | PlannerSpec, Any] = {}
        self.generation = 0

    def refresh(self) -> None:
        """Forgets everything; entry points and targets are read again at their next use."""
        with self._lock:
            importlib.invalidate_caches()
            forget_entry_points()
            self._backends = self._planners = None
            self._targets.clear()
            self.generation += 1

    @contextmanager
    def replaced(self, spec: BackendSpec, backend: Backend, reason: str) -> Iterator[None]:
        """Within the block, another spec and object replace the installed backend of the same name, for all threads.

        Args:
            reason: shown in the list of backends.

        Raises:
            BackendNotFoundError: no backend of this name is installed.
        """
        found = self.find(spec.name)
        with self._lock:
            before = self._backends, self._targets
            self._backends = tuple(
                replace(c, spec=spec, status="ok", reason=reason) if c is found else c
                for c in self.backends()
            )
            self._targets = self._targets | {spec: backend}
            self.generation += 1
        try:
            yield
        finally:
            with self._lock:
                self._backends, self._targets = before
                self.generation += 1

    def forget_plans(self) -> None:
        """Discards all cached plans. A planner calls this when its answers have changed."""
        with self._lock:
            self.generation += 1

    # ---- forks: a child has only the forking thread, so work of other threads never finishes there

    def before_fork(self) -> None:
        """Waits for a thread that imports plugins, because the child would inherit half-imported modules. The wait ends after
        `FORK_WAIT_S`: that thread may itself be waiting for this fork."""
        self._lock.acquire(timeout=FORK_WAIT_S)

    def after_fork_in_parent(self) -> None:
        """Releases the lock that `before_fork` acquired."""
        with suppress(RuntimeError):  # not acquired in time
            self._lock.release()

    def after_fork_in_child(self) -> None:
        """Replaces the lock, because its owner may be a thread that the child does not have. The guarded attributes are
        consistent at any time: each changes in one assignment."""
        self._lock = threading.RLock()

    # ---- discovery

    def backends(self) -> tuple[Candidate, ...]:
        """Returns all installed backends, with any status."""
        with self._lock:
            if self._backends is None:
                version = installed_version("kda-core")
                own = tuple(Candidate(s.name, "kda-core", version, s) for s in (REFERENCE_SPEC, FLA_SPEC))
                found = discover(BACKEND_GROUP, BackendSpec, entry_points, own)
                absent = () if fla_is_installed() else own[1:]
                self._backends = tuple(c for c in found if c not in absent)
            return self._backends

    def planners(self) -> tuple[Candidate, ...]:
        """Returns all installed planners, with any status."""
        with self._lock:
            if self._planners is None:
                self._planners = discover(PLANNER_GROUP, PlannerSpec, entry_points)
            return self._planners

    def load(self, spec: BackendSpec | PlannerSpec) -> Any:
        """Returns the object of `spec.target`, created once. A failure is kept too, and raised again until `refresh`.

        Raises:
            BackendUnavailableError: the module, the class or its constructor failed, or methods are missing.
        """
        with self._lock:
            if (loaded := self._targets.get(spec)) is None:
                loaded = self._targets[spec] = _create(spec)
        if isinstance(loaded, _Failure):
            raise BackendUnavailableError(
                f"{spec.name}: {spec.target} failed to load: {loaded.reason}"
            ) from loaded.cause
        return loaded

    # ---- choice

    def rules(self, backend: str | None) -> tuple[str | None, ...]:
        """Returns everything besides a call's metadata and the `generation` that decides which backend serves it."""
        if backend is not None:
            return (backend,)
        if (name := _override.get()) is not None:
            return (None, name)
        return (None, None, env.KDA_BACKEND.given())

    def rule(self, backend: str | None) -> tuple[str, tuple[str, ...]]:
        """Returns the rule that chooses the backend ("backend=", "use_backend", "KDA_BACKEND" or "automatic"), and the names
        that it gives, in order of preference."""
        for name, rule in ((backend, "backend="), (_override.get(), "use_backend")):
            if name is not None:
                return rule, (name,)
        order = env.backend_order()
        return ("KDA_BACKEND" if order else "automatic"), order

    def info(self) -> tuple[BackendInfo, ...]:
        """Returns every known backend, installed ones first, in the order of discovery."""
        missing = [
            BackendInfo(name, "not-installed", install.command(distribution), distribution, "", None)
            for name, distribution in self._missing().items()
        ]
        return (*map(self._info, self.backends()), *missing)

    def _missing(self) -> dict[str, str]:
        """Returns the backends of this project that are not installed, with what `install.command` installs for them."""
        known = {c.name for c in self.backends() if c.owner}
        return {name: owner for name, owner in published_backends().items() if name not in known}

    def _info(self, c: Candidate) -> BackendInfo:
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

    def refusal(self, c: Candidate, shape: ProblemShape, named: bool) -> str | None:
        """Returns why candidate `c` does not serve `shape`, or None if it does. `named`: the user named this backend."""
        if c.status != "ok":
            return f"{c.status}: {c.reason}"
        spec: BackendSpec = c.spec
        if spec.unavailable is not None:
            return f"unsupported: {spec.unavailable}"
        if not arch_matches(spec, shape.arch if shape.device_type == "cuda" else shape.device_type):
            return f"wrong-arch: runs on {show_archs(spec.archs)}, the inputs are on {_where(shape)}"
        if spec.name == REFERENCE_SPEC.name and shape.device_type != "cpu" and not named:
            return "serves GPU tensors only when named: backend='reference'"
        if (undeclared := spec.undeclared(shape)) is not None:
            return f"unsupported: {undeclared}"
        try:
            backend = self.load(spec)
        except BackendUnavailableError as error:
            return f"broken: {error}"
        if not shape.is_concrete:  # a backend cannot be asked about the sizes of a trace
            return None
        try:
            reason = backend.can_run(shape)
        except FAILURES as error:
            return f"broken: {spec.name}.can_run raised {show_error(error)}"
        if reason is not None and not isinstance(reason, str):
            return f"broken: {spec.name}.can_run returned {shown(reason)}, not None or a text"
        return None if reason is None else f"unsupported: {str.__str__(reason)}"

    def resolve(self, shape: ProblemShape, backend: str | None = None) -> Choice:
        """Returns the backend for a call, or for the backward of one whose shape has `needs_backward`: `backend`, else `use_backend`, else
        ``KDA_BACKEND``, else the best eligible one.

        Raises:
            BackendNotFoundError, BackendUnavailableError, BackendUnsupportedError: the named backend cannot serve the call.
            NoEligibleBackendError: no backend can; the message lists every backend with its reason.
        """
        for name, rule in ((backend, "backend="), (_override.get(), "use_backend")):
            if name is not None:
                return self._named(name, shape, rule)
        if order := env.backend_order():
            return self._first(order, shape)
        reasons: dict[int, str] = {}
        # a backend is not imported if one before it serves the call
        for c in sorted(self.backends(), key=_rank):
            reason = self.refusal(c, shape, named=False)
            if reason is None:
                return Choice(c.spec, self.load(c.spec), "automatic")
            reasons[id(c)] = reason
        refusals = [Refusal(c.name, reasons[id(c)]) for c in self.backends()]
        refusals += [Refusal(name, _not_installed(name, shape)) for name in self._missing()]
        raise NoEligibleBackendError(_no_backend(shape, "automatic", refusals))

    def _first(self, order: tuple[str, ...], shape: ProblemShape) -> Choice:
        """Returns the first backend of ``KDA_BACKEND`` that serves the call."""
        rule = f"KDA_BACKEND={','.join(order)!r}"
        missing = self._missing()
        # all names are looked up before any backend is asked, so that a misspelled name is an error in any position
        candidates = [None if name in missing else self.find(name, rule) for name in order]
        refusals = []
        for name, c in zip(order, candidates):
            reason = _not_installed(name, shape) if c is None else self.refusal(c, shape, named=True)
            if c is not None and reason is None:
                return Choice(c.spec, self.load(c.spec), "KDA_BACKEND")
            refusals.append(Refusal(name, str(reason)))
        raise NoEligibleBackendError(_no_backend(shape, rule, refusals))

    def refusals(self, shape: ProblemShape, backend: str | None = None) -> tuple[Refusal, ...]:
        """Returns every backend that would not serve `shape`, with its reason, for `kda_core.explain`. `backend`: as in
        `resolve`."""
        names = self.rule(backend)[1]
        found = [(c.name, self.refusal(c, shape, named=c.name in names)) for c in self.backends()]
        return tuple(Refusal(name, reason) for name, reason in found if reason is not None)

    def _named(self, name: str, shape: ProblemShape, rule: str) -> Choice:
        c = self.find(name, rule)
        reason = self.refusal(c, shape, named=True)
        if reason is None:
            return Choice(c.spec, self.load(c.spec), rule)
        served = [
            o.name for o in self.backends() if o.name != name and self.refusal(o, shape, named=True) is None
        ]
        hint = f"; these could serve it: {', '.join(served)}" if served else ""
        kind = BackendUnsupportedError if reason.startswith("unsupported") else BackendUnavailableError
        raise kind(f"backend {name!r} (chosen by {rule}) cannot serve this call: {reason}{hint}")

    def find(self, name: str, rule: str | None = None) -> Candidate:
        """Returns the installed backend of this name, with any status. `rule`: where the name comes from, for the message.

        Raises:
            BackendNotFoundError: no such backend is installed.
        """
        for c in self.backends():
            if c.name == name and c.owner:
                return c
        who = f"backend {name!r}" if rule is None else f"backend {name!r} (chosen by {rule})"
        installed = [c.name for c in self.backends() if c.owner]
        if (owner := (missing := self._missing()).get(name)) is not None:
            remedy = f"install it with: {install.command(owner)}; installed"
        else:
            near = difflib.get_close_matches(name.lower(), [*installed, *missing], n=1)
            remedy = f"did you mean {near[0]!r}? Installed" if near else "installed"
        raise BackendNotFoundError(f"{who} is not installed; {remedy}: {', '.join(installed)}")

    # ---- planners

    def planner(self) -> tuple[str, Planner] | None:
        """Returns name and object of the active planner, or None if none is installed or ``KDA_CP=0``.

        Raises:
            PlannerError: planners are installed, but all are broken or of another ABI.
        """
        if not env.context_parallel():
            return None
        broken: PlannerError | None = None
        for c in self.planners():
            if c.status != "ok":
                broken = broken or _planner_error(c.name, c.distribution, f"{c.status}: {c.reason}")
            elif c.spec.unavailable is None:
                try:
                    return c.name, self.load(c.spec)
                except BackendUnavailableError as error:
                    if broken is None:
                        broken = _planner_error(c.name, c.distribution, f"broken: {error}")
                        broken.__cause__ = error
        if broken is not None:
            raise broken
        return None

    def planner_error(self, name: str, what: str) -> PlannerError:
        """Returns the error that says `what` the planner `name` did wrong, its distribution, and how to turn it off."""
        owners = {c.name: c.distribution for c in self.planners() if c.owner}
        return _planner_error(name, owners.get(name, "no longer installed"), what)


REGISTRY = Registry()
if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(
        before=REGISTRY.before_fork,
        after_in_parent=REGISTRY.after_fork_in_parent,
        after_in_child=REGISTRY.after_fork_in_child,
    )


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, calls of this thread or asyncio task run on backend `name` or fail; there is no fallback.

    An explicit ``backend=`` argument takes precedence. The block also decides for the backwards of its forwards, wherever they run.
    A forward that activation checkpointing repeats outside of the block chooses its backend again.

    Raises:
        ArgumentError: `name` is not a string.
        BackendNotFoundError: `name` is not installed.
    """
    if not isinstance(name, str):
        raise ArgumentError("name", "the name of a backend", repr(name))
    REGISTRY.find(name, "use_backend")
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


# ---- observers: tests and tools record which backend ran


@dataclass(frozen=True)
class Call:
    """One executed call.

    Attributes:
        backend: name of the backend.
        entry: "chunk_fwd", "chunk_bwd" (a call of its own, maybe on another backend) or "recurrent_fwd".
        device_type: such as "cuda".
        planner: name of the planner that executed the call, or None for a direct call.
    """

    backend: str
    entry: str
    device_type: str
    planner: str | None = None


OBSERVERS: list[Callable[[Call], None]] = []
"""Usually there are none, and calls in which host time counts do not call `notify` then."""


def notify(backend: str, entry: str, device_type: str, planner: str | None = None) -> None:
    """Passes a `Call` with these fields to all observers."""
    for observer in tuple(OBSERVERS):
        observer(Call(backend, entry, device_type, planner))


@contextmanager
def record_calls() -> Iterator[list[Call]]:
    """Yields a list, to which every call of the process is appended within the block."""
    calls: list[Call] = []
    OBSERVERS.append(calls.append)
    try:
        yield calls
    finally:
        OBSERVERS.remove(calls.append)


# ---- helpers


def visible_archs() -> tuple[Any, ...]:
    """Returns "cpu" and the compute capability of each visible CUDA device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(dict.fromkeys(["cpu", *(torch.cuda.get_device_capability(i) for i in range(count))]))


def default_arch(spec: BackendSpec | None = None) -> Any:
    """Returns the architecture of an example call: that of the current GPU. Returns "cpu" if there is no GPU, and if the backend of
    `spec` runs on the CPU but not on this GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    gpu = torch.cuda.get_device_capability()
    if spec is not None and not arch_matches(spec, gpu) and arch_matches(spec, "cpu"):
        return "cpu"
    return gpu


def show_archs(archs: Any) -> str:
    """Returns architectures as text: "sm_90", "sm_100, sm_103", "cpu"."""
    names = [a if isinstance(a, str) else f"sm_{a[0]}{a[1]}" for a in archs]
    return ", ".join(sorted(names, key=lambda n: (len(n), n)))


def arch_matches(spec: BackendSpec, arch: Any) -> bool:
    """Returns whether a backend runs on `arch`, a compute capability or a device type."""
    return includes(spec.archs, arch)


def includes(archs: Collection[Arch], arch: Any) -> bool:
    """Returns whether the archs of a spec include `arch`, a compute capability or a device type."""
    if "any" in archs or arch in archs:
        return True
    least = [found for a in archs if (found := least_capability(a)) is not None]
    return isinstance(arch, tuple) and any(arch >= found for found in least)


def published_archs(name: str) -> frozenset[Arch]:
    """Returns where a backend of this project runs, whether it is installed or not."""
    if name == FLA_SPEC.name:
        return FLA_SPEC.archs
    return frozenset(arch for arch, owner in install.GPUS.items() if owner == f"kda-{name}")


def _where(shape: ProblemShape) -> str:
    return shape.device_type if shape.arch is None else f"{shape.device_type} ({show_archs([shape.arch])})"


def _no_backend(shape: ProblemShape, rule: str, refusals: list[Refusal]) -> str:
    width = max((len(r.name) for r in refusals), default=0)
    lines = [f"no backend serves this call on {_where(shape)} (choice: {rule})"]
    lines += [f"  {r.name:<{width}}  {r.reason}" for r in refusals]
    if shape.device_type != "cpu":
        lines.append("  backend='reference' runs on every device, slowly, with forward and backward")
    return "\n".join(lines)


def _not_installed(name: str, shape: ProblemShape) -> str:
    if shape.arch is not None and not includes(archs := published_archs(name), shape.arch):
        return f"not-installed; runs on {show_archs(archs)}"
    return f"not-installed: {install.command(published_backends()[name])}"


def _rank(c: Candidate) -> tuple[float, str]:
    """Returns the key by which the automatic choice sorts candidates."""
    return (0.0 if c.spec is None else -c.spec.priority, c.name)


def _create(spec: BackendSpec | PlannerSpec) -> Any:
    """Returns a new object of `spec.target`, or a `_Failure`."""
    module, _, attribute = spec.target.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
        problem = target_problem(spec, made)
    except FAILURES as error:
        return _Failure(show_error(error), error)
    return made if problem is None else _Failure(problem, None)


def _planner_error(name: str, distribution: str, what: str) -> PlannerError:
    return PlannerError(f"planner {name!r} ({distribution}): {what}; KDA_CP=0 turns it off")
