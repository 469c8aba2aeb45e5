"""The exceptions that the emulator raises for PTX and for its execution."""

from __future__ import annotations

from typing import Any


class PtxError(Exception):
    """The PTX cannot be parsed, or uses something that is not modelled.

    Attributes:
        message: the text without the place.
        line: 1-based line of the PTX; 0 if there is none.
        text: the instruction, or "".
    """

    def __init__(self, message: str, line: int = 0, text: str = ""):
        self.message, self.line, self.text = message, line, text
        where = f"PTX line {line}: " if line else ""
        super().__init__(f"{where}{message}" + (f"\n    {text}" if text else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the arguments of `__init__`.

        By default Python would call the class with `args`, which holds only the complete text.
        """
        return type(self), (self.message, self.line, self.text), self.__dict__


class ExecutionError(Exception):
    """The kernel did something that is undefined or forbidden on a device, or it never ends.

    Attributes:
        message: the text without the place.
        kernel: name of the entry.
        cta: linear index of the CTA in the grid; -1 if there is none.
        warp: index of the warp in its CTA; -1 if there is none.
        line: 1-based line of the PTX; 0 if there is none.
        text: the instruction, or "".
    """

    def __init__(
        self, message: str, kernel: str = "", cta: int = -1, warp: int = -1, line: int = 0, text: str = ""
    ):
        self.message, self.kernel, self.line, self.text = message, kernel, line, text
        self.cta, self.warp = cta, warp
        where = f"{kernel[:60]}: CTA {cta}, warp {warp}, PTX line {line}: " if line else f"{kernel[:60]}: "
        super().__init__(f"{where}{message}" + (f"\n    {text}" if text else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the arguments of `__init__`, see `PtxError.__reduce__`."""
        given = (self.message, self.kernel, self.cta, self.warp, self.line, self.text)
        return type(self), given, self.__dict__
