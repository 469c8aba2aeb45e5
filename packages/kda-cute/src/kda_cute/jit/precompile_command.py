"""``python -m kda_core precompile``: the kernels of the installed backends into the cache folder, ahead of time.

The compiler is `kda_cute.jit.precompile`; here is what the command selects and prints.
"""

from __future__ import annotations

import sys
import time

from kda_core import env
from kda_core.errors import ArgumentError, CompileError
from kda_cute import Built, precompile
from kda_cute.jit.ahead_of_time import Offer, offers
from kda_cute.jit.key import Variant

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def run(
    arch: str,
    backend: str | None = None,
    only: str | None = None,
    jobs: int | None = None,
    list_only: bool = False,
) -> int:
    """Compiles what the backends offer for `arch`, or what `backend` alone does, and prints progress. `only`: nothing
    but the variants whose name contains this text. `jobs`: worker processes, by default as many as CPUs that may be
    used, in a container those of its quota. `list_only`: prints the names and compiles nothing.

    Returns 0 if every selected variant is on disk (or listed); 1 if one failed, a backend is broken, or no backend
    has anything to compile; 130 after Ctrl-C, the workers stopped.

    Raises:
        ArgumentError: no compute capability belongs to `arch`, or no variant contains `only`.
        BackendNotFoundError: `backend` is not installed.
    """
    try:
        return _run(arch, backend, only, jobs, list_only)
    except KeyboardInterrupt:
        print(
            "interrupted: what was compiled is on disk; the same command compiles the rest", file=sys.stderr
        )
        return INTERRUPTED


def _run(arch: str, backend: str | None, only: str | None, jobs: int | None, list_only: bool) -> int:
    found = offers(arch, backend)
    chosen = {offer.backend: _select(offer, only) for offer in found}
    variants = [variant for selected in chosen.values() for variant in selected]
    total = sum(len(offer.variants) for offer in found)
    if total and only is not None and not variants:
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
        print(f"nothing to compile for {arch}", file=sys.stderr)
        return 1
    done = list_only or _compile(variants, jobs)
    return 0 if done and not broken else 1


def _select(offer: Offer, only: str | None) -> list[Variant]:
    return [variant for variant in offer.variants if only is None or only in str(variant)]


def _count(offer: Offer, selected: list[Variant]) -> str:
    if not offer.variants:
        return offer.reason
    some = "" if len(selected) == len(offer.variants) else f"{len(selected)} of "
    return f"{some}{len(offer.variants)} variants; others compile when a call first needs them"


def _compile(variants: list[Variant], jobs: int | None) -> bool:
    """Compiles, with a line for each variant and a summary; whether all of them are on disk."""
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


def _say(line: str) -> None:
    print(line, flush=True)  # at once, in a log file too
