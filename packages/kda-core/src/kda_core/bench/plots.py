"""Pictures of measurements. A `Picture` is data; `draw` needs matplotlib.

Every picture answers one question. It is 768 px wide at 96 px/inch, at most 720 px high, and no text is below 9 pt (12 px).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WIDTH, MOST_ROWS = 8.0, 24  # inches; rows of a picture that fits a screen
COLORS = (  # distinguishable with colour-blind vision
    "#0072b2", "#d55e00", "#009e73", "#999999", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
SUFFIXES = (".svg", ".png")


@dataclass(frozen=True)
class Picture:
    """One horizontal chart.

    Attributes:
        question: the question that the picture answers; the alternative text on the page.
        title, subtitle: what is shown, on which GPU, with which versions.
        xlabel: quantity and unit of the horizontal axis.
        series: name in the legend -> label of the row -> value.
        texts: label of the row -> text beside its value, for pictures with one series.
        ranges: label of the row -> lowest and highest value, drawn as a line, for pictures with one series.
        reference: a value with a vertical line, such as 1 for a speed-up; None for no line.
        order: labels of the rows from top to bottom; empty for the order of the series.
        log: whether the horizontal axis is logarithmic.
    """

    question: str
    title: str
    subtitle: str
    xlabel: str
    series: dict[str, dict[str, float]]
    texts: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    reference: float | None = None
    order: tuple[str, ...] = ()
    log: bool = False

    @property
    def rows(self) -> list[str]:
        """Labels of the rows, from top to bottom."""
        return list(self.order) or list(
            dict.fromkeys(label for values in self.series.values() for label in values)
        )


def draw(picture: Picture, path: Path) -> None:
    """Writes a picture as SVG or PNG, by the suffix of `path`. The same picture and version of matplotlib give the same bytes.

    Raises:
        ValueError: the picture has more than `MOST_ROWS` rows or more series than `COLORS`.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot, ticker

    rows = picture.rows
    if len(rows) > MOST_ROWS:
        raise ValueError(f"picture: expected at most {MOST_ROWS} rows, got {len(rows)}: {picture.title}")
    if len(picture.series) > len(COLORS):
        raise ValueError(
            f"picture: expected at most {len(COLORS)} series, got {len(picture.series)}: {picture.title}"
        )
    options: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "kda",
        "font.size": 9.5,
        "figure.facecolor": "white",
    }
    with pyplot.rc_context(options):
        figure, axes = pyplot.subplots(figsize=(WIDTH, 1.45 + 0.25 * max(len(rows), 3)), layout="constrained")
        if len(picture.series) == 1:
            _bars(axes, picture)
            figure.supxlabel(picture.xlabel, fontsize=9.5)
        else:
            _dots(axes, picture)
            axes.set_xlabel(picture.xlabel)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        if picture.log:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_locator(ticker.NullLocator())
        else:
            axes.set_xlim(left=0)
            axes.margins(x=0.02)
        if picture.reference is not None:
            axes.axvline(picture.reference, color="black", linewidth=1)
        axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(picture.title, fontsize=12, fontweight="bold")
        axes.set_title(picture.subtitle, fontsize=9.5)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _bars(axes, picture: Picture) -> None:
    """Draws the one series as bars, with their texts and ranges."""
    (values,) = picture.series.values()
    widths = list(values.values())
    low, high = ([abs(picture.ranges.get(k, (v, v))[i] - v) for k, v in values.items()] for i in (0, 1))
    errors = {"xerr": (low, high), "capsize": 3} if picture.ranges else {}
    bars = axes.barh(range(len(widths)), widths, 0.72, color=COLORS[0], **errors)
    # Beside the bar, or beside the end of its range.
    for bar, label, above in zip(bars, values, high, strict=True):
        place = (bar.get_width() + above, bar.get_y() + bar.get_height() / 2)
        axes.annotate(picture.texts.get(label, ""), place, (4, 0), textcoords="offset points", va="center")
    axes.set_xlim(right=1.22 * max(w + h for w, h in zip(widths, high, strict=True)))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _dots(axes, picture: Picture) -> None:
    """Draws each series as dots, with a legend below the axis."""
    rows = picture.rows
    for (name, values), color, marker in zip(picture.series.items(), COLORS, MARKERS, strict=False):
        axes.plot(
            list(values.values()), [rows.index(label) for label in values], marker, color=color, label=name
        )
    axes.grid(alpha=0.3)
    columns = len(picture.series) if sum(map(len, picture.series)) < 80 else 2
    axes.figure.legend(loc="outside lower center", ncols=columns, frameon=False)
