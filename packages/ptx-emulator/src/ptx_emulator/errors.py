"""What the emulator raises."""

from __future__ import annotations


class PtxError(Exception):
    """PTX that cannot be parsed, or that uses something which is not modelled. ``line``: of the PTX."""

    def __init__(self, message: str, line: int = 0, text: str = ""):
        self.line, self.text = line, text
        where = f"PTX line {line}: " if line else ""
        super().__init__(f"{where}{message}" + (f"\n    {text}" if text else ""))


class ExecutionError(Exception):
    """A kernel did something that a device would not define, or that never ends.

    ``line`` and ``text``: of the PTX; ``cta``: index of the block; ``warp``: of the block.
    """

    def __init__(
        self, message: str, kernel: str = "", cta: int = -1, warp: int = -1, line: int = 0, text: str = ""
    ):
        self.kernel, self.cta, self.warp, self.line, self.text = kernel, cta, warp, line, text
        where = f"{kernel[:60]}: CTA {cta}, warp {warp}, PTX line {line}: " if line else f"{kernel[:60]}: "
        super().__init__(f"{where}{message}" + (f"\n    {text}" if text else ""))
