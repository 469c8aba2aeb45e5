"""What the emulator raises."""

from __future__ import annotations

from typing import Any


class PtxError(Exception):
    """PTX that cannot be parsed, or that uses something which is not modelled. ``line``: of the PTX."""

    def __init__(self, message: str, line: int = 0, text: str = ""):
        self.message, self.line, self.text = message, line, text
        where = f"PTX line {line}: " if line else ""
        super().__init__(f"{where}{message}" + (f"\n    {text}" if text else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions are copied and pickled by calling the class with `args`, which holds the whole text alone."""
        return type(self), (self.message, self.line, self.text), self.__dict__


class ExecutionError(Exception):
    """A kernel did something that a device would not define, or that never ends.

    ``line`` and ``text``: of the PTX; ``cta``: index of the block; ``warp``: of the block.
    """

    def __init__(
        self, message: str, kernel: str = "", cta: int = -1, warp: int = -1, line: int = 0, text: str = ""
    ):
        self.message, self.kernel, self.line, self.text = message, kernel, line, text
        self.cta, self.warp = cta, warp
        where = f"{kernel[:60]}: CTA {cta}, warp {warp}, PTX line {line}: " if line else f"{kernel[:60]}: "
        super().__init__(f"{where}{message}" + (f"\n    {text}" if text else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        """As `PtxError.__reduce__`."""
        given = (self.message, self.kernel, self.cta, self.warp, self.line, self.text)
        return type(self), given, self.__dict__
