"""Writes the Markdown page and the pictures of a results file.

    python benchmarks/report.py benchmarks/results/h200/prefill.json
    python benchmarks/report.py benchmarks/results/h200/*.json

The page of prefill.json goes to ``docs/benchmarks/<device>.md``, those of training.json, decode.json, cp.json, cp_multi_gpu.json
and host.json to ``<device>-training.md``, ``<device>-decode.md``, ``<device>-cp.md``, ``<device>-cp-multi-gpu.md`` and
``<device>-host.md``; the pictures go beside them.
Pictures need matplotlib (``pip install matplotlib``); ``--pages-only`` writes no pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the folder of the package, not of this script

from benchmarks import report_cp, report_decode, report_host, report_prefill, report_training
from benchmarks.pages import Data
from kda_core.bench import plots

DOCS = Path(__file__).parent.parent / "docs" / "benchmarks"


class Report(NamedTuple):
    """How the page of one kind of results file is made."""

    suffix: str  # of the page's name
    page: Callable[[Data, str], str]
    pictures: Callable[[Data], dict[str, plots.Picture]]


#: By the name of the results file without its suffix.
REPORTS = {
    "prefill": Report("", report_prefill.page, report_prefill.pictures),
    "training": Report("-training", report_training.page, report_training.pictures),
    "decode": Report("-decode", report_decode.page, report_decode.pictures),
    "cp": Report("-cp", report_cp.page, report_cp.pictures),
    "cp_multi_gpu": Report("-cp-multi-gpu", report_cp.multi_gpu_page, report_cp.multi_gpu_pictures),
    "host": Report("-host", report_host.page, report_host.pictures),
}


def main(argv: list[str] | None = None) -> int:
    """Writes the page and the pictures of each results file."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("results", type=Path, nargs="+", help="results files")
    p.add_argument("--out", type=Path, default=DOCS, help="folder of the pages")
    p.add_argument("--pages-only", action="store_true", help="write no pictures")
    args = p.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for path in args.results:
        if path.stem not in REPORTS:
            raise SystemExit(f"results: expected a file named {', '.join(REPORTS)}.json, got {path}")
        data = json.loads(path.read_text())
        device = data["runs"][-1]["device"]
        name, text = rendered(path.stem, data, device)
        (args.out / name).write_text(text)
        print(args.out / name)
        for end, picture in {} if args.pages_only else REPORTS[path.stem].pictures(data).items():
            plots.draw(picture, args.out / f"{device}-{end}.svg")
            print(args.out / f"{device}-{end}.svg")
    return 0


def rendered(kind: str, data: Data, device: str) -> tuple[str, str]:
    """Returns the name and the text of a page; `kind` is a key of `REPORTS`."""
    report = REPORTS[kind]
    return f"{device}{report.suffix}.md", report.page(data, device)


if __name__ == "__main__":
    sys.exit(main())
