"""A variant of every kernel class, and what its compilation gives."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any, NamedTuple

from helpers.compiled import compiled as cached
from kda_cute.arguments import Address, Long, types
from kda_cute.decode import DECODE, DecodeConfig
from kda_cute.gradients import GradientsConfig
from kda_cute.interface import KernelInterface
from kda_cute.jit.key import Variant
from kda_cute.journal import JOURNAL, VERIFY, JournalConfig
from kda_cute.merge import MERGE, MergeConfig
from kda_cute.store import manifest
from kda_cute.store.export import exported
from kda_cute.store.manifest import Manifest
from kda_cute.verify import VerifyConfig
from kda_sm90.config import PrefillConfig
from kda_sm90.interfaces import GRADIENTS, PREFILL
from kda_sm100 import arguments as sm100
from kda_sm100.arguments import CHAIN, INTRA_CHUNK, OUTPUT, SERVING_CHAIN, SUMMARY
from kda_sm100.config import (
    MODES,
    BackwardChainConfig,
    ChainConfig,
    IntraChunkConfig,
    OutputConfig,
    SummaryConfig,
)

HOPPER, BLACKWELL = "sm_90a", "sm_100a"

#: (interface, configuration, architecture), at least one of every class and of every argument struct.
VARIANTS: tuple[tuple[KernelInterface, Any, str], ...] = (
    (PREFILL, PrefillConfig(32, 2, mode="execute"), HOPPER),
    (PREFILL, PrefillConfig(32, 1, gate="precomputed", serving=True), HOPPER),
    (GRADIENTS, GradientsConfig("precomputed"), HOPPER),
    (DECODE, DecodeConfig(rows=16), HOPPER),
    (JOURNAL, JournalConfig(v_first=False), HOPPER),
    (VERIFY, VerifyConfig(4), HOPPER),
    (MERGE, MergeConfig(16), HOPPER),
    (INTRA_CHUNK, IntraChunkConfig(32, "precomputed"), BLACKWELL),
    (INTRA_CHUNK, IntraChunkConfig(32, strided=True), BLACKWELL),
    (INTRA_CHUNK, IntraChunkConfig(64, "precomputed", backward=True), BLACKWELL),
    (CHAIN, ChainConfig(32), BLACKWELL),
    (sm100.SAVING_CHAIN, ChainConfig(saves=64), BLACKWELL),
    *((sm100.BACKWARD_CHAINS[mode], BackwardChainConfig(mode), BLACKWELL) for mode in MODES),
    (sm100.GRADIENTS, GradientsConfig("precomputed"), BLACKWELL),
    (SERVING_CHAIN, ChainConfig(32, serving=True), BLACKWELL),
    (SUMMARY, SummaryConfig(32), BLACKWELL),
    (sm100.SEGMENT_CHAIN, ChainConfig(32, serving=True), BLACKWELL),
    (sm100.SEGMENT_SUMMARY, SummaryConfig(32), BLACKWELL),
    (OUTPUT, OutputConfig(32), BLACKWELL),
)


class Compiled(NamedTuple):
    """The PTX of a variant, and its object file."""

    variant: Variant
    ptx: str
    content: bytes


@functools.cache
def compiled(interface: KernelInterface, config: Any, arch: str) -> Compiled:
    """Compiles a variant, once for all processes."""
    return Compiled(Variant(interface.load(), config, arch), *cached(interface, config, arch))


def write(folder: Path, *variants: tuple[KernelInterface, Any, str], **changes: Any) -> Path:
    """Writes exported kernels of one architecture as ``precompile --export`` does. ``changes``: fields of
    the manifest. Returns the folder of the architecture."""
    (arch,) = {arch for _, _, arch in variants}
    target = folder / arch
    target.mkdir(parents=True, mode=0o755)
    folder.chmod(0o755)
    kernels = {}
    for one in variants:
        description, packed = exported(*compiled(*one)[::2])
        (target / description.file).write_bytes(packed)
        kernels[description.kernel, description.config] = description
    packages = {package for interface, _, _ in variants for package in manifest.source_packages(interface)}
    sources = {package: manifest.source_digest(package) for package in packages}
    fields = {"arch": arch, "sources": sources, "toolchain": {}, "minimum_driver": 13000, "kernels": kernels}
    (target / manifest.FILE).write_text(Manifest(**(fields | changes)).text())
    for path in (target, *target.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def values_of(interface: KernelInterface, config: Any, seed: int) -> tuple[int | float, ...]:
    """Returns values of the argument struct: addresses of any size, small numbers, HV a multiple of H."""
    choose = random.Random(seed)
    make: dict[Any, Any] = {
        Address: lambda: choose.randrange(1 << 48) * 16,
        Long: lambda: choose.randrange(1 << 40),
        int: lambda: choose.randrange(1, 100),
        float: lambda: choose.randrange(-8, 8) / 4,
    }
    struct = interface.arguments(config)
    values = {name: make[kind]() for name, kind in types(struct).items()}
    if "H" in values:
        values["HV"] = values["H"] * choose.randrange(1, 4)
    if "offset_bytes" in values:
        values["offset_bytes"] = choose.choice((0, 4, 8))
    return struct(**values)
