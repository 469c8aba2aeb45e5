"""Every way to fail has one class here. All are also the built-in exception that a caller would catch anyway."""

from __future__ import annotations


class KdaError(Exception):
    """Base of every exception that this project raises on purpose."""


# ---- arguments: the message names the argument, what was expected and what came


class ArgumentError(KdaError, ValueError):
    """An option has a value, or stands in a combination, that the contract does not allow."""

    def __init__(self, argument: str, expected: str, actual: str) -> None:
        super().__init__(f"{argument}: expected {expected}, got {actual}")
        self.argument, self.expected, self.actual = argument, expected, actual


class ShapeError(ArgumentError):
    """A tensor has the wrong shape."""


class StrideError(ArgumentError):
    """A tensor that is written in place has a layout that cannot be served."""


class DeviceError(ArgumentError):
    """A tensor lies on the wrong device."""


class DtypeError(ArgumentError, TypeError):
    """A tensor, or an option, has the wrong type."""


class DerivativeError(KdaError, NotImplementedError):
    """A derivative that does not exist here: forward-mode AD, or a second derivative. Also a RuntimeError."""


# ---- backends


class BackendError(KdaError, RuntimeError):
    """Base of what can go wrong with backends."""


class BackendNotFoundError(BackendError):
    """The named backend is not known: neither installed nor one that this project publishes."""


class BackendUnavailableError(BackendError):
    """The named backend is known, but cannot be loaded here (not installed, broken, wrong ABI, wrong architecture)."""


class BackendUnsupportedError(BackendError):
    """The named backend is there, but does not serve this call."""


class NoEligibleBackendError(BackendError):
    """The automatic choice found no backend for a call; the message is a table of who refused and why."""


class BackendContractError(BackendError):
    """A backend broke the ABI: it returned something else than the outputs that it was given."""


class PlannerError(BackendError):
    """A planner is broken, or its plan does not fit the call."""


# ---- just-in-time compilation


class CompileError(KdaError, RuntimeError):
    """A kernel did not compile, or its compiler is not installed."""


class JitDisabledError(CompileError):
    """A kernel variant is not in the cache and ``KDA_DISABLE_JIT=1`` forbids to compile it."""
