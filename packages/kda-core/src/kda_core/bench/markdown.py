"""Parts of Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], text: Iterable[str] = ()) -> list[str]:
    """Returns the lines of a Markdown table. Columns are right-aligned, except for those named in `text`."""
    align = ["---" if name in text else "---:" for name in columns]
    return [f"| {' | '.join(cells)} |" for cells in (columns, align, *rows)]


def number(x: float | None, form: str) -> str:
    """Returns a formatted figure; None, which was not measured, becomes an empty cell."""
    return "" if x is None else format(x, form)
