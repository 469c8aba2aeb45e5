"""The manifest of exported kernels: one file for each architecture.

A folder of exported kernels has a folder for each architecture, such as ``sm_90a``, with ``manifest.json`` and a file
``<kernel>-<hash of the configuration>.cubin.xz`` for each kernel.

A kernel is found by its class and its configuration. It is used only if the packages that define it have the sources that it was
compiled from; the versions of Python, torch, the DSL and the CPU do not matter, because a cubin does not depend on them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kda_cute.arguments import Address, Long, types
from kda_cute.interface import KernelInterface
from kda_cute.jit.key import canonical
from kda_cute.jit.sources import snapshot_of

#: Increment it when the meaning of a field changes.
SCHEMA = 2
FILE = "manifest.json"

#: Name in a manifest and code of `struct`, for each type of a field (`kda_cute.arguments`).
KINDS: dict[Any, tuple[str, str]] = {
    Address: ("address", "q"),
    Long: ("int64", "q"),
    int: ("int32", "i"),
    float: ("float32", "f"),
}


class ManifestError(ValueError):
    """A manifest cannot be read."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel, in the layout that CUDA gives it: aligned to its own size.

    Attributes:
        name, type: of the field of the argument struct; see `KINDS`.
        offset, size: in bytes, in the parameter buffer.
    """

    name: str
    type: str
    offset: int
    size: int


def layout(arguments: type[tuple], count: int | None = None) -> str:
    """Returns the parameter buffer of an argument struct, or its first `count` parameters, as a format of `struct`."""
    return "@" + "".join(KINDS[kind][1] for kind in list(types(arguments).values())[:count])


def parameters(arguments: type[tuple]) -> tuple[Parameter, ...]:
    """Returns the parameters of a kernel that takes an argument struct."""
    found, codes = [], ""
    for name, kind in types(arguments).items():
        text, code = KINDS[kind]
        codes += code
        size = struct.calcsize(code)
        found.append(Parameter(name, text, struct.calcsize("@" + codes) - size, size))
    return tuple(found)


@dataclass(frozen=True)
class Described:
    """What a launch of a cubin needs.

    Attributes:
        kernel: its class, as in `KernelInterface.kernel`.
        config: the text of its configuration, as `kda_cute.jit.key.canonical` writes it.
        symbol: of the kernel in the cubin.
        parameters: in order.
        threads: of a CTA, along x.
        shared_bytes: dynamic shared memory of a CTA.
        cooperative, overlaps: as in `KernelInterface`.
        cluster: CTAs of a cluster, along x.
    """

    kernel: str
    config: str
    symbol: str
    parameters: tuple[Parameter, ...]
    threads: int
    shared_bytes: int
    cooperative: bool
    overlaps: bool
    cluster: int


@dataclass(frozen=True)
class Exported(Described):
    """An exported kernel.

    Attributes:
        file: the compressed cubin.
        sha256: of the file.
        bytes: of the cubin.
    """

    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The exported kernels of an architecture.

    Attributes:
        arch: the architecture, such as "sm_90a".
        sources: the digest of each package that defines kernels (`source_digest`).
        toolchain: what compiled the kernels, for people: versions of the DSL's wheels and of ptxas.
        minimum_driver: the lowest version of CUDA that the driver must support, as ``cuDriverGetVersion`` counts: 13000 for 13.0.
        kernels: by (`Exported.kernel`, `Exported.config`).
    """

    arch: str
    sources: dict[str, str]
    toolchain: dict[str, str]
    minimum_driver: int
    kernels: dict[tuple[str, str], Exported]

    def find(self, interface: KernelInterface, config: object) -> Exported | None:
        """Returns the kernel of a configuration; None if it was not exported."""
        return self.kernels.get((interface.kernel, canonical(config)))

    def text(self) -> str:
        """Returns the content of the file. Equal lists of parameters are written once."""
        lists = list(dict.fromkeys(kernel.parameters for kernel in self.kernels.values()))
        content = {
            "schema": SCHEMA,
            "arch": self.arch,
            "sources": self.sources,
            "toolchain": self.toolchain,
            "minimum_driver": self.minimum_driver,
            "parameters": [[asdict(parameter) for parameter in one] for one in lists],
            "kernels": [
                {**asdict(kernel), "parameters": lists.index(kernel.parameters)}
                for kernel in self.kernels.values()
            ],
        }
        return json.dumps(content, indent=1) + "\n"


def read(text: bytes) -> Manifest:
    """Returns the manifest of a file's content.

    Raises:
        ManifestError: it has another schema, or is damaged.
    """
    try:
        content = json.loads(text)
        if content["schema"] != SCHEMA:
            raise ManifestError(f"schema {content['schema']}; this version of kda-cute reads schema {SCHEMA}")
        lists = [tuple(Parameter(**one) for one in each) for each in content["parameters"]]
        kernels = [Exported(**{**one, "parameters": lists[one["parameters"]]}) for one in content["kernels"]]
        if any(os.path.basename(kernel.file) != kernel.file for kernel in kernels):
            raise ManifestError("a file of a kernel is not in the folder of the manifest")
        return Manifest(
            str(content["arch"]),
            dict(content["sources"]),
            dict(content["toolchain"]),
            int(content["minimum_driver"]),
            {(kernel.kernel, kernel.config): kernel for kernel in kernels},
        )
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ManifestError(f"damaged: {type(error).__name__}: {error}") from error


def file_of(interface: KernelInterface, config: object) -> str:
    """Returns the name of the file of a kernel."""
    text = f"{interface.kernel} {canonical(config)}"
    return f"{interface.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cubin.xz"


def source_digest(package: str) -> str | None:
    """Returns the sha256 (hexadecimal) of the sources of a package; None if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return snapshot_of(Path(next(iter(spec.submodule_search_locations)))).digest()


def source_packages(interface: KernelInterface) -> list[str]:
    """Returns the packages whose sources define a kernel: this one, and that of its class."""
    return sorted({__name__.partition(".")[0], interface.package})
