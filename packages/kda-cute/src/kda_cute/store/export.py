"""From the object file of a compiled variant to its cubin: to launch it, or to write it with others and a manifest into a folder.

Needs the DSL."""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kda_core.errors import ArgumentError, CompileError
from kda_cute.interface import KernelInterface
from kda_cute.jit.cache import entry_of
from kda_cute.jit.key import Variant, canonical, toolchain
from kda_cute.store import cubin, manifest
from kda_cute.store.driver import DriverError, current
from kda_cute.store.launcher import Launcher, Loaded
from kda_cute.store.manifest import Described, Exported, Manifest


def interface_of(variant: Variant) -> KernelInterface:
    """Returns the interface of a variant's class.

    Raises:
        CompileError: it has none, so that it cannot be exported.
    """
    interface = getattr(variant.kernel, "interface", None)
    name = f"{variant.kernel.__module__}:{variant.kernel.__qualname__}"
    if not isinstance(interface, KernelInterface) or interface.kernel != name:
        raise CompileError(f"{variant} cannot be exported: the class states no KernelInterface of {name}")
    return interface


def described(variant: Variant, content: bytes) -> tuple[Described, bytes]:
    """Returns the description of a kernel and its cubin.

    Args:
        content: the object file of the variant, as the compile cache has it.

    Raises:
        CompileError: the cubin has other parameters or threads than the interface and the class state.
    """
    interface = interface_of(variant)
    instance: Any = variant.kernel(variant.config)
    parameters = manifest.parameters(interface.arguments(variant.config))
    try:
        image = cubin.cubin_of(content)
        entries = cubin.entries(image)
    except cubin.CubinError as error:
        raise CompileError(f"{variant} cannot be launched: {error}") from error
    if len(entries) != 1:
        raise CompileError(f"{variant} cannot be launched: expected one kernel, found {len(entries)}")
    entry = entries[0]
    expected = [(one.offset, one.size) for one in parameters]
    if expected != list(entry.parameters):
        raise CompileError(
            f"{variant} cannot be launched: expected parameters at {expected}, got {list(map(tuple, entry.parameters))}"
        )
    if entry.max_threads != (instance.threads, 1, 1):
        raise CompileError(
            f"{variant} cannot be launched: expected {instance.threads} threads, got {entry.max_threads}"
        )
    description = Described(
        kernel=interface.kernel,
        config=canonical(variant.config),
        symbol=entry.symbol,
        parameters=parameters,
        threads=instance.threads,
        shared_bytes=instance.shared_bytes,
        cooperative=interface.cooperative,
        overlaps=interface.overlaps,
        cluster=interface.cluster(variant.config),
    )
    return description, image


def exported(variant: Variant, content: bytes) -> tuple[Exported, bytes]:
    """Returns the description of an exported kernel and its compressed cubin; `content` and errors as in `described`."""
    description, image = described(variant, content)
    # A dictionary of the preset's 64 MiB would find no more than one of the cubin's size, in much more memory.
    size = max(1 << (len(image) - 1).bit_length(), 1 << 12)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": size}]
    packed = lzma.compress(image, lzma.FORMAT_XZ, filters=filters)
    file = manifest.file_of(interface_of(variant), variant.config)
    digest = hashlib.sha256(packed).hexdigest()
    return Exported(**vars(description), file=file, sha256=digest, bytes=len(image)), packed


def launcher_of(variant: Variant, content: bytes) -> Launcher:
    """Returns the callable of a compiled kernel; `content` and errors as in `described`.

    The driver loads it at once if torch uses a GPU already, and otherwise before the first launch: a machine that only compiles has
    no driver, and a process that may still fork must not initialise it.
    """
    import torch

    description, image = described(variant, content)
    loaded: list[Loaded] = []

    def load() -> Loaded:
        if not loaded:
            loaded.append(Loaded.of(current(), image, description))
        return loaded[0]

    if torch.cuda.is_initialized():
        with contextlib.suppress(DriverError):  # the launch raises it
            load()
    return Launcher(description, interface_of(variant), variant.config, load)


def check(variants: Iterable[Variant], folder: Path, arch: str) -> None:
    """Checks, before they are compiled, that `write` may write variants into a folder.

    Raises:
        ArgumentError: it already holds kernels of the architecture.
        CompileError: a variant's class has no interface.
    """
    for variant in variants:
        interface_of(variant)
    if (target := folder / arch).exists():
        raise ArgumentError(
            "--export", f"a folder without {arch}", f"{target}, which exists: remove it first"
        )


def write(variants: Iterable[Variant], folder: Path, arch: str) -> Manifest:
    """Writes the kernels of variants, which are in the compile cache, to ``folder/arch``: completely, or nothing.

    Raises:
        CompileError: a variant is not in the cache, or cannot be exported.
        OSError: the folder cannot be written, or already holds kernels of the architecture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{arch}.", dir=folder))
    try:
        kernels, packages, versions = {}, set(), set()
        for variant in variants:
            if (content := entry_of(variant).read()) is None:
                raise CompileError(f"{variant} cannot be exported: it is not in the cache folder")
            one, packed = exported(variant, content)
            kernels[one.kernel, one.config] = one
            packages.update(manifest.source_packages(interface_of(variant)))
            versions.add(cubin.ptxas_version(lzma.decompress(packed)))
            _write(temporary / one.file, packed)
        written = Manifest(
            arch=arch,
            sources={package: str(manifest.source_digest(package)) for package in sorted(packages)},
            toolchain={"wheels": toolchain()["wheels"], "ptxas": ", ".join(sorted(versions))},
            # a cubin runs on any driver of the same major version
            minimum_driver=max(1000 * int(version.partition(".")[0]) for version in versions),
            kernels=kernels,
        )
        _write(temporary / manifest.FILE, written.text().encode())
        temporary.chmod(0o755)
        os.rename(temporary, folder / arch)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return written


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o644)  # under any umask: others may read, nobody else may write
