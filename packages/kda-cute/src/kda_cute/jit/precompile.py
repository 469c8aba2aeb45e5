"""Compile many variants ahead of time, in worker processes that share the cache folder."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from kda_core import env
from kda_core.errors import CompileError
from kda_cute.jit.compile import ensure_on_disk
from kda_cute.jit.cpus import usable_cpus
from kda_cute.jit.key import Variant, canonical


@dataclass(frozen=True)
class Built:
    """What became of one variant: its ``name``, ``seconds`` of wall time, and whether it was ``compiled``
    (False: it was on disk). ``error`` is the message of a failure, empty if there was none."""

    name: str
    seconds: float
    compiled: bool
    error: str = ""


def _build(name: str, pickled: bytes) -> Built:
    """In a worker: build one variant. It comes as bytes, as the pool would die of one that cannot be
    imported."""
    start = time.perf_counter()
    compiled, error = False, ""
    try:
        compiled = ensure_on_disk(pickle.loads(pickled))
    except Exception as problem:  # noqa: BLE001 - whatever it is, it belongs to this variant alone
        named = isinstance(problem, CompileError)
        error = str(problem) if named else f"{name}: {type(problem).__name__}: {problem}"
    return Built(name, time.perf_counter() - start, compiled, error)


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes that are started within do not see Ctrl-C, which a terminal sends to all of them: each would print a
    traceback. Their parent stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def precompile(
    variants: Iterable[tuple[type, object, str]],
    *,
    workers: int | None = None,
    progress: Callable[[Built], None] | None = None,
) -> list[Built]:
    """Put (kernel class, configuration, architecture) variants into the cache folder; one ``Built`` for each.

    Each of ``workers`` processes (default: `usable_cpus`) imports the DSL once. They are spawned, so a script that
    calls this needs the usual ``if __name__ == "__main__"``. ``progress`` is called in this process after each
    variant. If it raises, and on Ctrl-C, the workers are stopped; what they have built stays. Variants that are given
    twice are built once.

    Raises ``ArgumentError`` before any work if a variant is not valid, ``CompileError`` before any work if the folder
    that the environment names cannot be used, and at the end if some variants failed, with all their messages; the
    others are in the folder then.
    """
    unique = {
        (kernel, canonical(config), arch): Variant(kernel, config, arch) for kernel, config, arch in variants
    }
    if not unique:
        return []
    if problem := env.cache_dir_problem():  # another folder than the one that was asked for is of no use here
        raise CompileError(f"nothing was compiled: {problem}")
    workers = min(len(unique), workers or usable_cpus())
    done: list[Built] = []
    processes: list[multiprocessing.process.BaseProcess] = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            with _sigint_blocked():
                futures = {pool.submit(_build, str(v), pickle.dumps(v)): str(v) for v in unique.values()}
                processes += pool._processes.values()  # spawned by `submit`, all of them
            for future in as_completed(futures):
                try:
                    built = future.result()
                except BrokenProcessPool as error:
                    built = Built(
                        futures[future], 0.0, False, f"{futures[future]}: a worker process died: {error}"
                    )
                done.append(built)
                if progress is not None:
                    progress(built)
        except BaseException:  # Ctrl-C, as a rule: leaving the block would build all the rest first
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise
    if failed := [built for built in done if built.error]:
        raise CompileError(
            f"{len(failed)} of {len(done)} kernels did not compile:\n"
            + "\n".join(built.error for built in failed)
        )
    return done
