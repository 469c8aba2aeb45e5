"""The exceptions of the project, one class for each kind of failure. Each class also derives from the built-in exception
that a caller would catch anyway."""

from __future__ import annotations

import reprlib
from typing import Any

from torch import Tensor


class KdaError(Exception):
    """Base of every exception that this project raises on purpose."""


def describe(x: object) -> str:
    """Returns a short description of any value for an error message."""
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)} of {x.dtype}"
    return f"{type(x).__name__} {reprlib.repr(x)}"


# ---- arguments: the message names the argument, what was expected and what came


class ArgumentError(KdaError, ValueError):
    """An option has a value, or a combination of options occurs, that the contract does not allow.

    Attributes:
        argument: name of the argument, as the caller knows it.
        expected: what the contract requires.
        actual: what the caller passed.
        hint: a sentence that says what the caller may have meant; empty if there is no guess.
    """

    def __init__(self, argument: str, expected: str, actual: str, hint: str = "") -> None:
        super().__init__(f"{argument}: expected {expected}, got {actual}" + (f". {hint}" if hint else ""))
        self.argument, self.expected, self.actual, self.hint = argument, expected, actual, hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles with all constructor arguments; the default uses `args`, which holds only the message."""
        return type(self), (self.argument, self.expected, self.actual, self.hint), self.__dict__


class ShapeError(ArgumentError):
    """A tensor has the wrong shape."""


class StrideError(ArgumentError):
    """A tensor that is written in place is not contiguous."""


class DeviceError(ArgumentError):
    """A tensor lies on the wrong device."""


class DtypeError(ArgumentError, TypeError):
    """A tensor or an option has the wrong type."""


class UnknownArgumentError(KdaError, TypeError):
    """A function has no such keyword; the message suggests the right one."""


class DerivativeError(KdaError, NotImplementedError):
    """The requested derivative is not implemented: forward-mode AD or a second derivative. Also a RuntimeError."""


# ---- backends


class BackendError(KdaError, RuntimeError):
    """Base of the errors that concern backends."""


class BackendNotFoundError(BackendError):
    """The named backend is not installed."""


class BackendUnavailableError(BackendError):
    """The named backend is installed, but cannot run here: broken, wrong ABI or wrong architecture."""


class BackendUnsupportedError(BackendError):
    """The named backend can run here, but does not serve this call."""


class NoEligibleBackendError(BackendError):
    """No backend serves the call; the message lists every backend with its reason."""


class BackendContractError(BackendError):
    """A backend violated the ABI: it returned other outputs than the ones that it was given, or its workspace size is not
    a number of bytes."""


class PlannerError(BackendError):
    """A planner is broken, or its plan does not fit the call."""


# ---- just-in-time compilation


class CompileError(KdaError, RuntimeError):
    """A kernel failed to compile, or its compiler is not installed."""


class JitDisabledError(CompileError):
    """A kernel variant is not in the cache, and ``KDA_DISABLE_JIT=1`` forbids compiling it."""
