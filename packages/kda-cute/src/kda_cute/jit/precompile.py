"""Ahead-of-time compilation of many variants, in worker processes that share the cache folder."""

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
    """The result of one variant.

    Attributes:
        name: `str(Variant)`.
        seconds: wall time.
        compiled: whether it was compiled; False if it was on disk or failed.
        error: the message of a failure, else empty.
    """

    name: str
    seconds: float
    compiled: bool
    error: str = ""


def _build(name: str, pickled: bytes) -> Built:
    """Builds one variant in a worker process. The variant comes pickled, because one that cannot be imported would break the
    pool."""
    start = time.perf_counter()
    compiled, error = False, ""
    try:
        compiled = ensure_on_disk(pickle.loads(pickled))
    except Exception as problem:  # noqa: BLE001 - a failure concerns this variant alone
        named = isinstance(problem, CompileError)
        error = str(problem) if named else f"{name}: {type(problem).__name__}: {problem}"
    return Built(name, time.perf_counter() - start, compiled, error)


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes that are started within the block ignore Ctrl-C, which a terminal sends to all processes. Otherwise each of them
    would print a traceback. The parent stops them."""
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
    """Compiles variants into the cache folder, unless they are there. Returns a `Built` for each.

    The worker processes are spawned, so a script that calls this function needs the usual ``if __name__ == "__main__"``. On
    Ctrl-C, and if `progress` raises, the workers are stopped; finished kernels stay in the folder.

    Args:
        variants: (kernel class, configuration, architecture). Duplicates are built once.
        workers: the number of worker processes, each of which imports the DSL once. Default: `usable_cpus`.
        progress: called in this process after each variant.

    Raises:
        ArgumentError: before any work, if a variant is not valid.
        CompileError: before any work, if the folder that the environment names cannot be used; at the end, if variants
            failed. It then contains all their messages, and the other variants are in the folder.
    """
    unique = {
        (kernel, canonical(config), arch): Variant(kernel, config, arch) for kernel, config, arch in variants
    }
    if not unique:
        return []
    if problem := env.cache_dir_problem():  # a fallback folder would not serve the user
        raise CompileError(f"nothing was compiled: {problem}")
    workers = min(len(unique), workers or usable_cpus())
    done: list[Built] = []
    processes: list[multiprocessing.process.BaseProcess] = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            with _sigint_blocked():
                futures = {pool.submit(_build, str(v), pickle.dumps(v)): str(v) for v in unique.values()}
                processes += pool._processes.values()  # `submit` has spawned all of them
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
        except BaseException:
            # Usually Ctrl-C. Otherwise the end of the block would wait for all variants.
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
