"""The subcommands that this package adds to ``python -m kda_core``: ``precompile`` and ``cache``.

This module parses options and prints. `kda_cute.jit.precompile` and `kda_cute.jit.housekeeping` do the work. The entry points
of the group ``kda_core.commands`` name `PRECOMPILE` and `CACHE`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kda_core import env
from kda_core.cli import positive
from kda_core.errors import ArgumentError, CompileError
from kda_core.extensions import Command
from kda_core.registry import REGISTRY
from kda_cute.jit import housekeeping
from kda_cute.jit.ahead_of_time import Offer, offers
from kda_cute.jit.cache import QUARANTINE, entry_of
from kda_cute.jit.key import Variant
from kda_cute.jit.precompile import Built, precompile
from kda_cute.jit.target import arch_of_capability, capability_of_arch, check_arch
from kda_cute.store.export import check, write

INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# ---- precompile


def _add_precompile_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--arch",
        type=_architecture,
        required=True,
        help="the GPU architecture, such as sm_90a; 9.0 and sm_90 mean sm_90a too",
    )
    p.add_argument("--backend", help="compile only what this backend lists")
    p.add_argument(
        "--only", metavar="TEXT", help="compile only variants whose name, as printed by --list, contains TEXT"
    )
    p.add_argument(
        "--cached",
        action="store_true",
        help="only variants that are in the cache folder already, such as those that a workload has used",
    )
    p.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="also write the kernels to DIR/ARCH, for machines without a compiler (KDA_KERNEL_DIR)",
    )
    p.add_argument("--jobs", type=positive, metavar="N", help="worker processes (default: the usable CPUs)")
    p.add_argument("--list", action="store_true", help="print the names of the variants and compile nothing")


def _architecture(text: str) -> str:
    """The type of ``--arch``: an architecture from its name or from a compute capability. Without a suffix it is that of
    `arch_of_capability`."""
    if found := re.fullmatch(r"(\d+)\.(\d)", text):
        return arch_of_capability((int(found[1]), int(found[2])))
    try:
        return check_arch(text) if text[-1:] in ("a", "f") else arch_of_capability(capability_of_arch(text))
    except ArgumentError:
        raise argparse.ArgumentTypeError(
            f"expected a compute capability such as 9.0, sm_90 or sm_90a, got {text}"
        ) from None


def _precompile(args: argparse.Namespace) -> int:
    """Runs ``precompile``. Returns 0 if every selected variant is on disk (or listed); 1 if a variant failed, a backend is
    broken, or there is nothing to compile; 130 after Ctrl-C.

    Raises:
        ArgumentError: without ``--cached``, no variant's name contains the text of ``--only``; or the folder of ``--export`` holds kernels of the
            architecture.
        CompileError: a variant cannot be exported.
        BackendNotFoundError: the backend of ``--backend`` is not installed.
    """
    if args.backend is not None:
        REGISTRY.find(args.backend)
    known = _architectures()
    if args.arch not in known and capability_of_arch(args.arch) not in map(capability_of_arch, known):
        expected = (
            ", ".join(f"{arch} ({name})" for arch, name in known.items())
            or "none: no GPU backend is installed"
        )
        args.usage_error(
            f"argument --arch: expected an architecture of an installed backend: {expected}; got {args.arch}"
        )
    try:
        return _run_precompile(
            args.arch, args.backend, args.only, args.cached, args.jobs, args.list, args.export
        )
    except KeyboardInterrupt:
        print(
            "interrupted: the variants compiled so far are on disk; the same command compiles the rest",
            file=sys.stderr,
        )
        return INTERRUPTED


def _architectures() -> dict[str, str]:
    """The architectures that the installed backends name -> the backends."""
    found: dict[str, list[str]] = {}
    for candidate in REGISTRY.backends():
        archs = () if candidate.spec is None else candidate.spec.archs
        for capability in sorted(arch for arch in archs if isinstance(arch, tuple)):
            found.setdefault(arch_of_capability(capability), []).append(candidate.name)
    return {arch: ", ".join(names) for arch, names in found.items()}


def _run_precompile(
    arch: str,
    backend: str | None,
    only: str | None,
    cached: bool,
    jobs: int | None,
    list_only: bool,
    folder: Path | None,
) -> int:
    found = offers(arch, backend)
    chosen = {offer.backend: _select(offer, only, cached) for offer in found}
    variants = [variant for selected in chosen.values() for variant in selected]
    total = sum(len(offer.variants) for offer in found)
    if total and only is not None and not cached and not variants:
        expected = f"a part of the name of one of {total} variants (--list prints them)"
        raise ArgumentError("--only", expected, repr(only))

    _say(f"kernels for {arch}, in {env.cache_dir()}")
    width = max(len(offer.backend) for offer in found)
    for offer in found:
        _say(f"  {offer.backend:<{width}}  {_count(offer, chosen[offer.backend])}")
    if list_only:
        for variant in variants:
            _say(str(variant))
    broken = [offer for offer in found if offer.broken]
    for offer in broken:
        print(f"backend {offer.backend} is {offer.reason}", file=sys.stderr)
    if not variants:
        print(
            f"no variant of {total} is in the cache folder" if cached else f"nothing to compile for {arch}",
            file=sys.stderr,
        )
        return 1
    if folder is not None:
        check(variants, folder, arch)
    done = list_only or _compile(variants, jobs)
    if done and not list_only and folder is not None:
        done = _export(variants, folder, arch)
    return 0 if done and not broken else 1


def _select(offer: Offer, only: str | None, cached: bool) -> list[Variant]:
    named = [variant for variant in offer.variants if only is None or only in str(variant)]
    return [variant for variant in named if not cached or entry_of(variant).read() is not None]


def _count(offer: Offer, selected: list[Variant]) -> str:
    if not offer.variants:
        return offer.reason
    some = "" if len(selected) == len(offer.variants) else f"{len(selected)} of "
    return f"{some}{len(offer.variants)} variants; others compile when a call first needs them"


def _compile(variants: list[Variant], jobs: int | None) -> bool:
    """Compiles the variants and prints a line for each and a summary. Returns whether all of them are on disk."""
    done: list[Built] = []

    def progress(built: Built) -> None:
        done.append(built)
        count = f"{len(done):>{len(str(len(variants)))}}/{len(variants)}"
        outcome = "FAILED" if built.error else "compiled" if built.compiled else "already on disk"
        _say(f"[{count}] {built.seconds:5.1f} s  {outcome:<15}  {built.name}")

    start, failure = time.perf_counter(), None
    try:
        precompile([(v.kernel, v.config, v.arch) for v in variants], workers=jobs, progress=progress)
    except CompileError as error:
        failure = error
    failed, compiled = sum(bool(one.error) for one in done), sum(one.compiled for one in done)
    _say(
        f"{len(done)} variants in {time.perf_counter() - start:.1f} s: {compiled} compiled, "
        f"{len(done) - compiled - failed} already on disk, {failed} failed"
    )
    if failure is not None:
        print(failure, file=sys.stderr)
    return failure is None


def _export(variants: list[Variant], folder: Path, arch: str) -> bool:
    """Writes compiled variants into a folder and prints a summary. Returns whether all of them are there."""
    try:
        written = write(variants, folder, arch)
    except CompileError as error:
        print(error, file=sys.stderr)
        return False
    except OSError as error:
        print(f"the folder {folder} cannot be written: {error}", file=sys.stderr)
        return False
    size = sum(path.stat().st_size for path in (folder / arch).iterdir())
    _say(f"{len(written.kernels)} kernels, {size / 1e6:.1f} MB, exported to {folder / arch}")
    return True


def _say(line: str) -> None:
    print(line, flush=True)  # at once, also into a log file


PRECOMPILE = Command(
    help="compile the kernels of the installed backends into the cache folder, ahead of time",
    description="Compiles the variants that the installed backends list for an architecture, in worker processes and without a "
    "GPU, into the folder KDA_CACHE_DIR. Variants that are in the folder are not compiled again. A variant that no backend lists "
    "compiles when a call first needs it. Run the command on a CPU of the model that will use the kernels; exported kernels run with "
    "any CPU.",
    add_arguments=_add_precompile_arguments,
    run=_precompile,
)


# ---- cache


def _add_cache_arguments(p: argparse.ArgumentParser) -> None:
    actions = p.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser(
        "info", help="print the folder, its size, its limit, and why kernels are in the quarantine"
    )
    actions.add_parser("list", help="print the compiled kernels: size, days since the last use, state, name")
    prune = actions.add_parser(
        "prune",
        help="remove the kernels that this installation cannot use, and the least recently used ones beyond the limit",
    )
    prune.add_argument(
        "--unused-for",
        type=positive,
        metavar="DAYS",
        help="also remove kernels that were not used for DAYS days",
    )
    prune.add_argument(
        "--max-size",
        type=_size,
        metavar="SIZE",
        help=f"the limit, such as 500M or 4G; 0 is no limit (default: {env.KDA_CACHE_MAXSIZE.name})",
    )
    clear = actions.add_parser("clear", help="remove all compiled kernels, and the quarantine")
    for action in (prune, clear):
        action.add_argument(
            "--dry-run", action="store_true", help="print what would be removed and remove nothing"
        )


def _size(text: str) -> int:
    """The type of ``--max-size``."""
    try:
        return env.size_in_bytes("--max-size", text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(f"expected {error.expected}, got {error.actual}") from error


def _cache(args: argparse.Namespace) -> int:
    """Runs ``cache``. Returns 0; 1 if the folder cannot be used or a kernel could not be removed."""
    if problem := env.cache_dir_problem():
        print(problem, file=sys.stderr)
        return 1
    folder = env.cache_dir()
    try:
        found, bad = housekeeping.entries(folder), housekeeping.quarantined(folder)
        if args.action == "info":
            return _info(folder, found, bad)
        if args.action == "list":
            return _list(folder, found)
        chosen = found if args.action == "clear" else _prunable(found, args.unused_for, args.max_size)
        status = _remove(folder, chosen, len(found), args.dry_run)
        return _remove_quarantine(folder, bad, args.dry_run) or status
    except OSError as error:
        print(f"the cache folder {folder} cannot be used: {error}", file=sys.stderr)
        return 1


def _prunable(
    found: list[housekeeping.Stored], unused_for: int | None, max_size: int | None
) -> list[housekeeping.Stored]:
    """The kernels that ``prune`` removes: stale ones, unused ones, and the least recently used ones beyond the limit."""
    limit = env.cache_maxsize() if max_size is None else max_size or None
    chosen = [e for e in found if e.stale or (unused_for and e.unused_days >= unused_for)]
    rest = [e for e in found if e not in chosen]
    return chosen + ([] if limit is None else housekeeping.least_recently_used(rest, limit))


def _info(folder: Path, found: list[housekeeping.Stored], bad: list[housekeeping.Quarantined]) -> int:
    stale = [entry for entry in found if entry.stale]
    usable = [entry for entry in found if not entry.stale]
    limit = env.cache_maxsize()
    size = "none" if limit is None else f"{limit / 1e6:.1f} MB"
    _say(f"folder      {folder}")
    _say(f"usable      {len(usable)} compiled kernels, {_megabytes(usable)} MB")
    _say(f"stale       {len(stale)} compiled kernels, {_megabytes(stale)} MB")
    _say(f"limit       {size} ({env.KDA_CACHE_MAXSIZE.name}={env.KDA_CACHE_MAXSIZE.raw()})")
    _say(f"quarantine  {len(bad)} bad entries, {_megabytes(bad)} MB")
    for entry in bad:
        _say(f"  {entry.name}: {entry.reason}")
    return 0


def _list(folder: Path, found: list[housekeeping.Stored]) -> int:
    _say(f"{len(found)} compiled kernels, {_megabytes(found)} MB, in {folder}")
    for entry in found:
        _say(_line(entry))
    return 0


def _line(entry: housekeeping.Stored) -> str:
    state = "usable" if entry.stale is None else f"stale ({entry.stale})"
    return f"{entry.bytes / 1e6:8.2f} MB  {entry.unused_days:4.0f} days  {state}  {entry.variant}"


def _remove(folder: Path, chosen: list[housekeeping.Stored], total: int, dry_run: bool) -> int:
    if dry_run:
        _say(
            f"would remove {len(chosen)} of {total} compiled kernels, {_megabytes(chosen)} MB, from {folder}"
        )
        for entry in chosen:
            _say(_line(entry))
        return 0
    removed, kept = housekeeping.remove(folder, chosen)
    _say(f"removed {len(removed)} of {total} compiled kernels, {_megabytes(removed)} MB, from {folder}")
    for entry in kept:
        print(
            f"not removed, because it is locked or the folder cannot be written: {entry.variant}",
            file=sys.stderr,
        )
    return 1 if kept else 0


def _remove_quarantine(folder: Path, bad: list[housekeeping.Quarantined], dry_run: bool) -> int:
    if not bad:
        return 0
    quarantine = folder / QUARANTINE
    if dry_run:
        _say(f"would remove {len(bad)} bad entries, {_megabytes(bad)} MB, from {quarantine}")
        return 0
    removed, kept = housekeeping.remove(quarantine, bad)
    _say(f"removed {len(removed)} bad entries, {_megabytes(removed)} MB, from {quarantine}")
    for entry in kept:
        print(f"not removed from {quarantine}: {entry.name}", file=sys.stderr)
    return 1 if kept else 0


def _megabytes(entries: Sequence[housekeeping.Files]) -> str:
    return f"{sum(entry.bytes for entry in entries) / 1e6:.1f}"


CACHE = Command(
    help="show the compiled kernels of the cache folder, or remove them",
    description="Shows or removes the compiled kernels of the folder KDA_CACHE_DIR. A kernel is stale if this installation cannot "
    "use it: its sources, the versions of Python, of the packages or of the CuTe DSL, or the CPU have changed. If several "
    "environments or machines share the folder, the kernels of the others are stale here: `prune --dry-run` prints what prune "
    "would remove. A kernel that is removed compiles again when a call needs it. Calibrations of kda-cp stay.",
    add_arguments=_add_cache_arguments,
    run=_cache,
)
