"""Every way to fail has one class here. All are also the built-in exception that a caller would catch anyway."""

from __future__ import annotations

from typing import Any


class KdaError(Exception):
    """Base of every exception that this project raises on purpose."""


# ---- arguments: the message names the argument, what was expected and what came


class ArgumentError(KdaError, ValueError):
    """An option has a value, or stands in a combination, that the contract does not allow.

    Attributes:
        argument: its name, as the caller knows it.
        expected, actual: what the contract wants, and what came.
        hint: what the caller may have meant, a sentence; empty where there is no guess.
    """

    def __init__(self, argument: str, expected: str, actual: str, hint: str = "") -> None:
        super().__init__(f"{argument}: expected {expected}, got {actual}" + (f". {hint}" if hint else ""))
        self.argument, self.expected, self.actual, self.hint = argument, expected, actual, hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions are copied and pickled by calling the class with `args`, which holds the message alone."""
        return type(self), (self.argument, self.expected, self.actual, self.hint), self.__dict__


class ShapeError(ArgumentError):
    """A tensor has the wrong shape."""


class StrideError(ArgumentError):
    """A tensor that is written in place has a layout that cannot be served."""


class DeviceError(ArgumentError):
    """A tensor lies on the wrong device."""


class DtypeError(ArgumentError, TypeError):
    """A tensor, or an option, has the wrong type."""


class UnknownArgumentError(KdaError, TypeError):
    """A function has no such keyword; the message says which it may have been."""


class DerivativeError(KdaError, NotImplementedError):
    """A derivative that does not exist here: forward-mode AD, or a second derivative. Also a RuntimeError."""


# ---- backends


class BackendError(KdaError, RuntimeError):
    """Base of what can go wrong with backends."""


class BackendNotFoundError(BackendError):
    """The named backend is not installed."""


class BackendUnavailableError(BackendError):
    """The named backend is installed, but cannot be used here (broken, wrong ABI, wrong architecture)."""


class BackendUnsupportedError(BackendError):
    """The named backend is there, but does not serve this call."""


class NoEligibleBackendError(BackendError):
    """The automatic choice found no backend for a call; the message is a table of who refused and why."""


class BackendContractError(BackendError):
    """A backend broke the ABI: it returned something else than the outputs that it was given, or asks for a workspace
    that is no number of bytes."""


class PlannerError(BackendError):
    """A planner is broken, or its plan does not fit the call."""


# ---- just-in-time compilation


class CompileError(KdaError, RuntimeError):
    """A kernel did not compile, or its compiler is not installed."""


class JitDisabledError(CompileError):
    """A kernel variant is not in the cache and ``KDA_DISABLE_JIT=1`` forbids to compile it."""
