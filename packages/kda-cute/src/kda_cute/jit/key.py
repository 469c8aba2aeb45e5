"""The key of a compiled kernel: every ingredient of its machine code, as text.

The exported object contains device code (a cubin) and host code (the argument checks and the launch). The DSL generates the host
code for the CPU on which it runs, including AVX-512. So the CPU's features are an ingredient: a cache in a shared home directory
must not serve host code to an older CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import sys
from pathlib import Path

from kda_core.errors import ArgumentError
from kda_cute.jit.sources import Sources, snapshot_of, sources_of
from kda_cute.jit.target import check_arch
from kda_cute.jit.versions import dsl_wheels

#: Increment it when the layout of the cache changes, or the way in which objects are exported.
FORMAT = "2"
_CPUINFO = Path("/proc/cpuinfo")
_HERE = Path(__file__).parents[1]  # the whole package: device functions are part of the kernels
snapshot_of(_HERE)  # taken at import: see `kda_cute.jit.sources`
_LITERALS = (type(None), bool, int, float, str)


def canonical(value: object, where: str = "config") -> str:
    """Returns a text of a configuration. Two texts are equal if and only if the configurations are the same.

    Args:
        value: a frozen dataclass whose fields are None, bool, int, float, str, or tuples and frozen dataclasses of these.
        where: the name of the value in an error.

    Raises:
        ArgumentError: `value` contains anything else. The text of an array may omit elements, and that of other objects may
            contain an address.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        if not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise ArgumentError(where, "a frozen dataclass", f"{cls.__qualname__}, which is not frozen")
        values = [getattr(value, name) for name in _names(cls)]
        if all(type(x) in _PLAIN for x in values):
            return _text(cls, *values)
        texts = [_literal(x, f"{where}.{name}") for name, x in zip(_names(cls), values, strict=True)]
        return _written(cls, texts)
    raise ArgumentError(where, "a frozen dataclass", repr(value))


#: Types whose equal values have equal texts, unlike 0.0 and -0.0.
_PLAIN = frozenset({type(None), bool, int, str})


@functools.cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


@functools.lru_cache(maxsize=4096, typed=True)  # True is not 1
def _text(cls: type, *values: object) -> str:
    """Returns the text of a configuration of such values. Every first call of a shape needs one."""
    return _written(cls, [repr(x) for x in values])


def _written(cls: type, texts: list[str]) -> str:
    fields = (f"{name}={text}" for name, text in zip(_names(cls), texts, strict=True))
    return f"{cls.__module__}:{cls.__qualname__}({', '.join(fields)})"


def _literal(value: object, where: str) -> str:
    if type(value) in _LITERALS:
        return repr(value)
    if type(value) is tuple:
        return "(" + "".join(_literal(item, f"{where}[{i}]") + ", " for i, item in enumerate(value)) + ")"
    if dataclasses.is_dataclass(value):
        return canonical(value, where)
    expected = "None, a bool, int, float or str, or a tuple or frozen dataclass of these"
    raise ArgumentError(where, expected, f"{value!r} of type {type(value).__qualname__}")


#: Instruction sets that a compiler of host code may use, as prefixes of their names in /proc/cpuinfo. Other flags there describe
#: mitigations, virtualisation and counters, and change with microcode and operating systems.
_INSTRUCTIONS = (
    "3dnow", "abm", "adx", "aes", "amx", "apx", "avx", "bmi", "cmov", "cx8", "cx16", "f16c", "fma", "fxsr", "gfni", "lahf",
    "lm", "lzcnt", "mmx", "movbe", "movdir", "pclmul", "popcnt", "prefetch", "rdpid", "rdrand", "rdseed", "sha", "sm3",
    "sm4", "sse", "ssse", "tbm", "vaes", "vpclmul", "xop", "xsave",
    "asimd", "atomics", "bf16", "crc32", "cssc", "f8", "fcma", "flagm", "fp", "frint", "i8mm", "ilrcpc", "jscvt", "lrcpc",
    "lse", "mops", "pmull", "rng", "sme", "sve",
)  # fmt: skip
_MODEL = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU architecture", "CPU part")


def _cpu() -> str:
    """Architecture, model and a digest of the instruction sets of this CPU, such as ``x86_64 GenuineIntel 6 143 3f2c...``.

    The host code of an object depends on these. Microcode, clocks, steppings and flags of mitigations are left out: they
    change on one machine, and differ between the machines that share a cache.
    """
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields: dict[str, set[str]] = {}  # sets, because cores may differ
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), set()).add(value.strip())
    model = [value for name in _MODEL for value in sorted(fields.get(name, ()))]
    words = {
        word for name in ("flags", "Features") for value in fields.get(name, ()) for word in value.split()
    }
    wanted = sorted(word for word in words if word.startswith(_INSTRUCTIONS))
    return " ".join([platform.machine(), *model, hashlib.sha256(" ".join(wanted).encode()).hexdigest()[:16]])


def _wheels() -> str:
    return ", ".join(f"{name} {version}" for name, version in dsl_wheels().versions)


@functools.cache
def toolchain() -> dict[str, str]:
    """Returns the ingredients that all kernels of a process share. Imports the DSL, which then chooses its CUDA version."""
    import cutlass

    return {
        "format": FORMAT,
        "wheels": _wheels(),
        "cuda": str(cutlass.CUDA_VERSION),
        # The DSL translates Python's syntax tree, which differs between Python versions.
        "python": f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}",
        "platform": sys.platform,
        "cpu": _cpu(),
        # CUTE_DSL_COMPILER_OPT, CUTE_DSL_LINEINFO and others change the code; the list depends on the version.
        "environment": " ".join(
            f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("CUTE_DSL_")
        ),
    }


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel class, its configuration and an architecture: what one object file contains.

    Raises:
        ArgumentError: the configuration is not made of literals, `arch` is not the name of an architecture, or the class is
            local to a function (its closure would not be part of the key).
    """

    kernel: type
    config: object
    arch: str

    def __post_init__(self) -> None:
        check_arch(self.arch)
        canonical(self.config)
        if "<locals>" in self.kernel.__qualname__:
            raise ArgumentError("kernel", "a class at the top level of a module", self.kernel.__qualname__)

    def __str__(self) -> str:
        names = (field.name for field in dataclasses.fields(self.config))  # type: ignore[arg-type]
        fields = (f"{name}={getattr(self.config, name)!r}" for name in names)
        return f"{self.kernel.__qualname__}({', '.join(fields)}) for {self.arch}"

    @property
    def stem(self) -> str:
        """The readable prefix of the names of this variant's files. All configurations share it."""
        return f"{self.kernel.__qualname__}.{self.arch}"

    @property
    def options(self) -> str:
        """The options of ``cute.compile``."""
        return compile_options(self.kernel, self.arch)

    def ingredients(self) -> dict[str, str]:
        """Returns everything that changes the machine code, as name -> text."""
        return {
            "kernel": f"{self.kernel.__module__}:{self.kernel.__qualname__}",
            "config": canonical(self.config),
            "arch": self.arch,
            "options": self.options,
            "sources": self._sources().digest(),
            **toolchain(),
        }

    def outdated(self, thorough: bool = False) -> str | None:
        """Returns why this process may not load or store the variant: it runs other versions than are installed now
        (`kda_cute.jit.sources`). None if it may.

        Args:
            thorough: also compare the versions of the DSL's wheels, which takes longer.
        """
        if thorough and (found := _wheels()) != toolchain()["wheels"]:
            return f"{found} were installed while this process ran with {toolchain()['wheels']}"
        return self._sources().outdated()

    def pin_sources(self) -> None:
        """Makes the DSL trace the sources that this process imported, even if the files on disk have changed."""
        self._sources().pin()

    def _sources(self) -> Sources:
        return kernel_sources(self.kernel, type(self.config))


def compile_options(kernel: type, arch: str) -> str:
    """Returns the options of ``cute.compile`` for a kernel class. They always name the architecture: otherwise the DSL queries
    the driver."""
    extra = getattr(kernel, "compile_options", "")
    return f"--enable-tvm-ffi --gpu-arch {arch} {extra}".strip()


def kernel_sources(kernel: type, config: type) -> Sources:
    """Returns the sources of a kernel class and its configuration's class. Their bases take part in tracing, so their packages
    are included."""
    return sources_of([*kernel.__mro__, *config.__mro__], _HERE)


def digest(ingredients: dict[str, str]) -> str:
    """Returns the sha256 (hexadecimal) of the ingredients, independent of their order."""
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()
