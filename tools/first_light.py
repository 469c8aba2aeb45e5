"""Everything that a GPU must show on its first day, in one command: unit kernels, conformance, tests, sanitizer, times, constants.

    python tools/first_light.py --arch sm_100a                  # on a Blackwell GPU
    python tools/first_light.py --arch sm_90a --only units sums # on a Hopper GPU

Each step is a process with a time limit, and a failure does not stop the next one. The folder (``--folder``, first-light-<arch>) gets
report.md, the output of every step, and all measured files; a zip archive of it is what to send back. Exits with 1 if a step failed.

The step `units` executes single instructions and small products on the GPU and compares them with the emulator's bits. `sums` says
which rule the tensor core follows when it sums products.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BACKENDS = {"sm_90a": "sm90", "sm_100a": "sm100", "sm_103a": "sm100"}
#: Tests of the conformance kit that the sanitizer runs: lengths, slots, tails and graphs.
SANITIZED = "length or pool or slots or checkpoints or decode or packed or graph"
#: torch and `kda_cute.store.driver` ask the driver for what may not be there, and handle its error.
NO_API_ERRORS = ("--report-api-errors", "no")
SHOWN = 40  # last lines of a failed step in the report


@dataclass(frozen=True)
class Step:
    """A process.

    Attributes:
        title: what the step asks.
        command: program and arguments.
        limit_s: time limit in seconds.
    """

    name: str
    title: str
    command: tuple[str, ...]
    limit_s: int


@dataclass(frozen=True)
class Result:
    """What became of a step. ``outcome``: "passed", "failed", "timed out", or why the step did not run."""

    step: Step
    outcome: str
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        return self.outcome in ("failed", "timed out")


def steps(arch: str, folder: Path) -> list[Step]:
    """Returns all steps in order. They write their files to ``folder``."""
    python, backend = sys.executable, BACKENDS[arch]
    calibrate = (python, "-m", "helpers.emulator.calibrate")
    kit = (python, "-m", "kda_core", "conformance", backend, "--kda-device", "cuda")
    quick = (*kit, "--kda-quick", "-k", SANITIZED)
    units = ("--arch", arch, "--fixtures", str(folder / "units"))
    sanitizer = ("compute-sanitizer", "--error-exitcode", "1", "--tool")
    benchmark = lambda name, *options: (
        python,
        f"benchmarks/{name}.py",
        "--out",
        str(folder / f"{name}.json"),
        *options,
    )
    return [
        Step("machine", "Are the packages installed, and is the GPU visible?", (python, "-m", "kda_core", "doctor"), 300),
        Step("record", "What do single instructions compute?", (*calibrate, "record", *units), 3600),
        Step("units", "Does the emulator compute the same bits?", (*calibrate, "report", *units), 3600),
        Step("sums", "How are products summed?", (python, "-m", "helpers.emulator.sums", str(folder / "units")), 300),
        Step("conformance", f"Is {backend} right?", kit, 7200),
        Step("tests", "Do the tests for this GPU pass?", (python, "-m", "pytest", "-q", f"tests/{backend}", "tests/cp"), 7200),
        Step("memcheck", "Are all accesses within bounds?", (*sanitizer, "memcheck", *NO_API_ERRORS, *quick), 7200),
        Step("racecheck", "Are accesses of shared memory ordered?", (*sanitizer, "racecheck", *quick), 7200),
        Step("prefill", "How fast is prefill?", benchmark("run", "--table", "public", "--impl", f"kda-{backend}"), 3600),
        Step("decode", "How fast is decoding?", benchmark("decode", "--impl", f"kda-{backend}", "rmw"), 3600),
        Step("constants", "What are the constants of kda-cp?", (python, "-m", "kda_cp", "calibrate", "--backend", backend), 1800),
    ]  # fmt: skip


def run(step: Step, folder: Path) -> Result:
    """Runs a step in the root of the checkout; its output goes to ``<folder>/<name>.txt`` too."""
    program = shutil.which(step.command[0])
    if program is None:
        return Result(step, f"not run: {step.command[0]} is not on PATH", 0.0, "")
    path, start = folder / f"{step.name}.txt", time.monotonic()
    folders = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": folders, "PYTHONUNBUFFERED": "1"}
    with path.open("w") as file:
        try:
            done = subprocess.run(
                [program, *step.command[1:]], check=False, cwd=ROOT, env=environment, stdout=file,
                stderr=subprocess.STDOUT, timeout=step.limit_s,
            )  # fmt: skip
            outcome = "failed" if done.returncode else "passed"
        except subprocess.TimeoutExpired:
            outcome = "timed out"
    return Result(step, outcome, time.monotonic() - start, path.read_text(errors="replace"))


def report(arch: str, results: Iterable[Result]) -> str:
    """Returns the report in Markdown: a table of all steps, and the end of the output of each one that failed."""
    results = list(results)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    lines = [f"# First light on {arch}, {date}", "", "| step | question | outcome | seconds |", "| --- | --- | --- | --- |"]  # fmt: skip
    lines += [f"| {r.step.name} | {r.step.title} | {r.outcome} | {r.seconds:.0f} |" for r in results]
    for r in results:
        if r.step.name == "sums" and not r.failed:
            lines += ["", "## Sums", "", *r.output.rstrip().splitlines()]
        if r.failed:
            end = r.output.rstrip().splitlines()[-SHOWN:]
            lines += ["", f"## {r.step.name}: {r.outcome}", "", "```", *end, "```"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", choices=BACKENDS, required=True, help="architecture of the GPU")
    parser.add_argument("--folder", type=Path, help="folder of the report (first-light-<arch>)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone")
    options = parser.parse_args(arguments)
    folder = (options.folder or Path(f"first-light-{options.arch}")).resolve()
    every = steps(options.arch, folder)
    if unknown := set(options.only or ()) - {step.name for step in every}:
        known = ", ".join(step.name for step in every)
        parser.error(f"--only: expected some of {known}, got {', '.join(sorted(unknown))}")
    folder.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for step in every:
        if options.only and step.name not in options.only:
            continue
        print(f"{step.name}: {step.title}", flush=True)
        results.append(run(step, folder))
        print(f"  {results[-1].outcome}, {results[-1].seconds:.0f} s", flush=True)
        (folder / "report.md").write_text(
            report(options.arch, results)
        )  # after every step: the rest may be cut off
    archive = shutil.make_archive(str(folder), "zip", folder)
    print(f"send back {archive}")
    return int(any(r.failed for r in results))


if __name__ == "__main__":
    sys.exit(main())
