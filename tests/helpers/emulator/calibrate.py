"""Calibration: records the outputs of `cases` on a GPU as fixtures and compares the emulator's outputs with them.

    PYTHONPATH=tests python -m helpers.emulator.calibrate record            needs the GPU; writes one file for each group of cases
    PYTHONPATH=tests python -m helpers.emulator.calibrate report --write    needs no GPU; compares and writes the page in docs

Both accept parts of "group/name" that select cases ("prefill/" selects the kernel of kda-sm90). Recording replaces the selected
cases in the files and keeps the others; `--missing` records only cases that the files lack. The packages must be installed or on
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import platform
import queue
import re
import sys
import time
import traceback
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers.emulator import ptx, tensor_maps
from helpers.emulator.cases import CASES, TO_BE_RECORDED, Bits, Case, Limit, Near

FIXTURES = Path(__file__).parent / "fixtures"
WRITTEN = Path(__file__).parents[3] / "docs/ptx-emulator-calibration.md"
KEPT = 1024  # the most elements of an output that a fixture keeps
ABOUT = "about"  # array of each file: a list of [description of a machine, names of the cases recorded there] as JSON
SECONDS = 90  # time limit of a case, compilation included


# ---- outputs


def thinned(x: torch.Tensor) -> np.ndarray:
    """The elements of an output that a fixture keeps. The stride is odd, so it visits all columns and rows."""
    flat = x.flatten()
    flat = flat[:: -(-len(flat) // KEPT) | 1] if len(flat) > KEPT else flat
    return flat.view(torch.int16).numpy() if x.dtype is torch.bfloat16 else flat.numpy()


class Inputs:
    """Stands in for `ptx.execute` and computes a checksum of the input tensors. Random numbers are the same on every machine,
    but the last bit of a logarithm may differ between processors."""

    def __init__(self) -> None:
        self.inner, self.crc = ptx.execute, 0

    def __call__(
        self, text: str, *arguments: Any, scratch: Iterable[torch.Tensor] = (), **options: Any
    ) -> int:
        scratch = list(scratch)
        empty = {x.data_ptr() for x in scratch}
        for x in arguments[3]:
            # Tensor maps hold addresses, and scratch tensors hold arbitrary bytes: neither is part of the checksum.
            a_map = isinstance(x, torch.Tensor) and x.dtype is torch.uint8 and x.numel() == 128
            if isinstance(x, torch.Tensor) and not a_map and x.data_ptr() not in empty:
                self.crc = zlib.crc32(x.contiguous().flatten().view(torch.uint8).numpy(), self.crc)
        return self.inner(text, *arguments, scratch=scratch, **options)


def outputs(case: Case) -> dict[str, np.ndarray]:
    """Run a case with the current `ptx.execute`: its outputs as fixtures keep them, and "inputs", the checksum of its inputs."""
    inputs = ptx.execute = Inputs()
    try:
        found = {name: thinned(x) for name, x in case.run().items()}
    finally:
        ptx.execute = inputs.inner
    return found | {"inputs": np.array([inputs.crc], np.uint32)}


# ---- recording


def use_gpu(arch: str) -> None:
    """Execute PTX for this architecture, and encode tensor maps, by the driver from now on."""
    from helpers.emulator import gpu

    ptx.execute, tensor_maps.encode, ptx.images, ptx.target = gpu.run, gpu.encode, {}, arch


def serve(connection: Any, gpu_arch: str | None) -> None:
    """Main function of a worker process: runs cases by name, until None. A failing case does not affect the others."""
    if gpu_arch is not None:
        use_gpu(gpu_arch)
    while (name := connection.recv()) is not None:
        try:
            connection.send((outputs(CASES[name]), None))
        except Exception:  # noqa: BLE001 - every error is listed
            connection.send((None, traceback.format_exc()))


class Worker:
    """A worker process that runs `serve`. A failure or timeout replaces the process, because errors of a GPU are sticky."""

    def __init__(self, gpu_arch: str | None) -> None:
        self.gpu_arch, self.process = gpu_arch, None

    def run(self, name: str) -> tuple[dict[str, np.ndarray] | None, str | None]:
        """The outputs of a case and None, or None and the error."""
        if self.process is None:
            context = multiprocessing.get_context("forkserver")  # it imports once for all workers
            context.set_forkserver_preload(["torch", "ptx_emulator", "kda_cute"])
            self.connection, other = context.Pipe()
            self.process = context.Process(target=serve, args=(other, self.gpu_arch), daemon=True)
            self.process.start()
            other.close()
        try:
            self.connection.send(name)
            if not self.connection.poll(SECONDS):
                raise TimeoutError(f"no answer within {SECONDS} s")
            found, error = self.connection.recv()
        except (EOFError, OSError, TimeoutError) as broken:
            found, error = None, f"{type(broken).__name__}: {broken}"
        if error is not None:
            self.stop()
        return found, error

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def about(on_gpu: bool) -> dict[str, str]:
    """The machine, the versions and the date of a recording."""
    found = {"gpu": "none, emulated"}
    if on_gpu:
        from helpers.emulator import gpu

        found = gpu.describe()
    path = Path("/proc/driver/nvidia/version")
    if on_gpu and path.exists():
        found["driver"] = re.search(r"\d+\.\d[\d.]*", path.read_text())[0]
    for package in ("torch", "numpy", "nvidia-cutlass-dsl"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["python"] = platform.python_version()
    found["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return found


def record(
    folder: Path, names: list[str], on_gpu: bool = True, jobs: int = 1, arch: str = "sm_90a"
) -> dict[str, str]:
    """Write the fixtures of the named cases into ``folder``. ``arch``: of the GPU. Returns the errors of the cases that failed."""
    start, errors = time.monotonic(), {}
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    workers = [Worker(arch if on_gpu else None) for _ in range(jobs)]
    for worker in workers:
        idle.put(worker)

    def run(name: str) -> tuple[dict[str, np.ndarray] | None, str | None]:
        worker = idle.get()
        try:
            return worker.run(name)
        finally:
            idle.put(worker)

    found: dict[str, dict[str, np.ndarray]] = {}
    # The cases that compile longest start first.
    ordered = sorted(names, key=lambda name: CASES[name].group != "prefill")
    with ThreadPoolExecutor(jobs) as pool:
        for name, (arrays, error) in zip(ordered, pool.map(run, ordered)):
            if arrays is None:
                errors[name] = error or "no outputs"
                print(f"failed: {name}", flush=True)
                continue
            case = CASES[name]
            for output, x in arrays.items():
                found.setdefault(case.group, {})[f"{stored(case)}|{output}"] = x
    for worker in workers:
        worker.stop()
    folder.mkdir(parents=True, exist_ok=True)
    for group, arrays in found.items():
        update(folder / f"{group}.npz", arrays, about(on_gpu))
    log = folder / "errors.txt"
    log.unlink(missing_ok=True)
    if errors:
        log.write_text("\n".join(f"==== {name}\n{error}" for name, error in errors.items()))
    for name, error in errors.items():
        print(f"FAILED {name}: {last_line(error)}")
    seconds = time.monotonic() - start
    print(f"{len(names) - len(errors)} of {len(names)} cases recorded in {seconds:.0f} s")
    return errors


def last_line(error: str) -> str:
    """The message of a traceback, without its frames."""
    lines = [line for line in error.splitlines() if line.strip() and not line.startswith(" ")]
    return lines[-1] if lines else error


def stored(case: Case) -> str:
    """The name of a case in its fixture file, where a slash would be a folder."""
    return case.name.replace("/", " ")


def case_of(array: str) -> str:
    """The case of an array "case|output". Names of cases may contain "|", names of outputs do not."""
    return array.rpartition("|")[0]


def update(path: Path, arrays: dict[str, np.ndarray], note: dict[str, str]) -> None:
    """Replace the outputs of cases in a fixture file and keep those of other cases. ``note``: machine, versions and date of the
    new outputs."""
    cases = {case_of(name) for name in arrays}
    notes = []
    if path.exists():
        with np.load(path) as archive:
            kept = [n for n in archive.files if n != ABOUT and case_of(n) not in cases]
            arrays = {n: archive[n] for n in kept} | arrays
            notes = [
                [where, sorted(set(names) - cases)] for where, names in json.loads(archive[ABOUT].tobytes())
            ]
    same = [names for where, names in notes if where == note]
    if same:
        same[0][:] = sorted({*same[0], *cases})
    else:
        notes.append([note, sorted(cases)])
    text = json.dumps([entry for entry in notes if entry[1]])
    save(path, {ABOUT: np.frombuffer(text.encode(), np.uint8), **dict(sorted(arrays.items()))})


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write an .npz whose bytes depend only on the arrays, not on the time."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, x in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as file:
                np.lib.format.write_array(file, np.ascontiguousarray(x), allow_pickle=False)


# ---- comparing


class MissingFixture(Exception):
    """A case has no recorded outputs."""


@dataclass(frozen=True)
class Finding:
    """The result of a comparison: its description, and whether it is within the limit of the case."""

    text: str
    good: bool


def fixture(case: Case, folder: Path = FIXTURES) -> dict[str, np.ndarray]:
    """The recorded outputs of a case, with the checksum of their inputs. Raises `MissingFixture`."""
    path = folder / f"{case.group}.npz"
    prefix = f"{stored(case)}|"
    if path.exists():
        with np.load(path) as archive:
            found = {
                name.removeprefix(prefix): archive[name] for name in archive.files if name.startswith(prefix)
            }
        if found:
            return found
    raise MissingFixture(f"no fixture of {case.group}/{case.name} in {path.name}: record it (calibrate.py)")


def recorded(case: Case, folder: Path = FIXTURES) -> bool:
    """Whether a case has a fixture."""
    try:
        return bool(fixture(case, folder))
    except MissingFixture:
        return False


def compare(case: Case, found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> Finding:
    """Compare the outputs of a case with the recorded ones: the largest difference and the number of differing elements."""
    same_inputs = np.array_equal(found["inputs"], want["inputs"])
    names = [name for name in want if name != "inputs"]
    if sorted(names) != sorted(name for name in found if name != "inputs"):
        return Finding(f"outputs {sorted(found)}, recorded {sorted(want)}", False)
    worst, differing, total = 0.0, 0, 0
    for name in names:
        a, b = found[name], want[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return Finding(f"{name}: {a.dtype}{list(a.shape)}, recorded {b.dtype}{list(b.shape)}", False)
        unsigned = f"u{a.itemsize}"
        differing += int((a.view(unsigned) != b.view(unsigned)).sum())
        total += a.size
        worst = max(worst, difference(case.limit, a, b))
    note = "" if same_inputs else " (of other inputs)"
    if not differing:
        return Finding(f"equal{note}", True)
    few = f"{differing} of {total} differ"
    if isinstance(case.limit, Bits):
        return Finding(few + note, False)
    if isinstance(case.limit, Near):
        return Finding(f"{few}, by at most {worst:.0f} ulp{note}", worst <= case.limit.ulps)
    return Finding(f"norm {worst:.1e}, {few}{note}", worst <= case.limit.relative)


def difference(limit: Limit, a: np.ndarray, b: np.ndarray) -> float:
    """The difference in the unit of the limit. Elements within its absolute difference count as equal."""
    if isinstance(limit, Bits):
        return float((a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")).any())
    if a.dtype == np.int16:  # bf16
        a, b = ((x.astype(np.uint32) << 16).view(np.float32) for x in (a.view(np.uint16), b.view(np.uint16)))
    x, y = a.astype(np.float64), b.astype(np.float64)
    if isinstance(limit, Near):
        ordered = [
            np.where(v < 0, -(v & 0x7FFFFFFF), v) for v in (z.view(np.int32).astype(np.int64) for z in (a, b))
        ]
        ulps = np.abs(ordered[0] - ordered[1])
        with np.errstate(invalid="ignore"):
            allowed = (np.abs(x - y) <= limit.absolute) | (np.isnan(x) & np.isnan(y))
        return float(np.where(allowed, 0, ulps).max())
    if not (np.isfinite(x) == np.isfinite(y)).all():
        return np.inf
    norm = float(np.linalg.norm(y))
    return float(np.linalg.norm(x - y)) / norm if norm else float(np.linalg.norm(x))


def compared(names: Iterable[str], folder: Path = FIXTURES) -> Iterator[tuple[Case, Finding]]:
    """Run cases on the emulator and compare them with their fixtures."""
    for name in names:
        case = CASES[name]
        try:
            want = fixture(case, folder)
        except MissingFixture as missing:
            listed = name in TO_BE_RECORDED
            yield case, Finding("to be recorded" if listed else f"MissingFixture: {missing}", listed)
            continue
        try:
            yield case, compare(case, outputs(case), want)
        except Exception as error:  # noqa: BLE001 - every error is a row of the table
            yield case, Finding(f"{type(error).__name__}: {str(error).splitlines()[0]}", False)


def row(case: Case, finding: Finding) -> str:
    """A row of the table."""
    cells = [
        case.name,
        case.group,
        finding.text + ("" if finding.good else " **(not allowed)**"),
        str(case.limit),
    ]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def report(names: list[str], folder: Path = FIXTURES) -> tuple[str, bool]:
    """The table of the named cases, and whether all of them are within their limits."""
    lines = ["| case | group | emulator against recorded | allowed difference |", "| --- | --- | --- | --- |"]
    good = True
    for case, finding in compared(names, folder):
        good &= finding.good
        lines.append(row(case, finding))
    return "\n".join(lines), good


def machines(folder: Path = FIXTURES) -> str:
    """A list of the machines and versions that recorded the fixtures, with the number of cases of each group."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as archive:
            for where, names in json.loads(archive[ABOUT].tobytes()):
                count = f"{len(names)} of {path.stem}"
                found.setdefault("; ".join(f"{k} {v}" for k, v in where.items()), []).append(count)
    return "\n".join(f"- {', '.join(counts)}: {text}" for text, counts in found.items())


PAGE = """# The emulator beside a GPU

This page compares the emulator with outputs that an H200 and, where noted, an H100 recorded for the cases of `tests/helpers/emulator/cases`. The last column is
the largest difference that a case may have:

| what a case computes | the emulator must match |
| --- | --- |
| arithmetic with exactly defined results, products of matrices | bit for bit |
| an approximate instruction | within the ulps or the absolute difference of the last column |
| a whole kernel, which contains approximate instructions | within a norm: that of the difference, relative to that of the recorded output |

"Of other inputs" means that logarithms or exponentials on the machine that wrote this page differ in the last bit from those on the
recording machine.

`PYTHONPATH=tests python -m helpers.emulator.calibrate report --write` writes this page, and `tests/emulator/test_calibration.py` checks it.
[Calibration](ptx-emulator.md#calibration) explains how to record.

## Recordings

"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="record fixtures on the GPU")
    recording.add_argument("--missing", action="store_true", help="record only cases that have no fixture")
    recording.add_argument("--jobs", type=int, default=8, help="number of processes (8)")
    recording.add_argument(
        "--emulate", action="store_true", help="use the emulator instead of a GPU, to try this program"
    )
    reporting = commands.add_parser("report", help="compare the emulator with the fixtures")
    reporting.add_argument("--write", action="store_true", help=f"write {WRITTEN.name}, with all cases")
    for one in (recording, reporting):
        one.add_argument(
            "--arch",
            default="",
            help="only cases that this architecture can run, such as sm_100a (record: sm_90a)",
        )
        one.add_argument("names", nargs="*", help="parts of the names of cases (all cases)")
        one.add_argument("--fixtures", type=Path, default=FIXTURES, help="folder of the fixture files")
    options = parser.parse_args(arguments)
    names = [name for name in CASES if not options.names or any(part in name for part in options.names)]
    if arch := options.arch or ("sm_90a" if options.command == "record" else ""):
        names = [name for name in names if CASES[name].runs_on(arch)]
    if options.command == "record" and options.missing:
        names = [name for name in names if not recorded(CASES[name], options.fixtures)]
    if not names:
        parser.error("no case matches")
    if options.command == "record":
        errors = record(options.fixtures, names, not options.emulate, options.jobs, arch)
        return 1 if errors else 0
    if options.write and (options.names or options.arch):
        parser.error("--write needs all cases: pass no names and no --arch")
    table, good = report(names, options.fixtures)
    page = f"{PAGE}{machines(options.fixtures)}\n\n## Cases\n\n{table}\n"
    if options.write:
        WRITTEN.write_text(page)
    print(page)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
