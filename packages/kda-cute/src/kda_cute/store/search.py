"""`KernelStore`: finds an exported kernel in folders, checks it and loads it."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_core import env, extensions, storage
from kda_cute.interface import KernelInterface
from kda_cute.store import manifest
from kda_cute.store.driver import Driver, DriverError, current
from kda_cute.store.launcher import Launcher, Loaded
from kda_cute.store.manifest import Exported, Manifest, ManifestError

logger = logging.getLogger("kda_cute")

#: The group of the entry points of packages with exported kernels. An entry point names a package whose folder holds a folder for
#: each architecture.
GROUP = "kda_core.kernels"

#: The largest files that are read. A compressed cubin has up to 200 kB, a manifest a few MB.
FILE_BYTES = 64 << 20


class Refused(Exception):
    """A kernel or a manifest is not used. The message names the file and the reason."""


class Absent(Refused):
    """A folder does not have the kernel."""


@dataclass(frozen=True)
class Folder:
    """A folder with exported kernels.

    Attributes:
        path: the folder.
        origin: what names it, for messages: an environment variable or a distribution.
        trusted: whether its files are read without a check of their owners. Those of an installed package are, as its code is.
    """

    path: Path
    origin: str
    trusted: bool

    def read(self, arch: str, name: str) -> bytes:
        """Returns the content of a file of an architecture.

        Raises:
            Refused: it cannot be read, or another user may have written it.
        """
        path = self.path / arch / name
        try:
            if self.trusted:
                return path.read_bytes()
            with storage.opened(self.path), storage.opened(path.parent) as folder:
                return folder.read(name, FILE_BYTES)
        except FileNotFoundError:
            raise Absent(f"{path} does not exist ({self.origin})") from None
        except storage.UntrustedError as error:
            raise Refused(f"{path} is not used: {error}") from error
        except OSError as error:
            raise Refused(f"{path} cannot be read: {error.strerror}") from error

    def manifest(self, arch: str) -> Manifest:
        """Returns the manifest of an architecture.

        Raises:
            Refused: there is none, or it cannot be used.
        """
        key = self, arch
        if key not in _manifests:
            path, content = self.path / arch / manifest.FILE, self.read(arch, manifest.FILE)
            try:
                found = manifest.read(content)
            except ManifestError as error:
                raise Refused(f"{path} is not used: {error}") from error
            if found.arch != arch:
                raise Refused(f"{path} is not used: its kernels are for {found.arch}")
            _manifests[key] = found
        return _manifests[key]

    def archs(self) -> list[str]:
        """Returns the architectures of the folder."""
        try:
            return sorted(path.parent.name for path in self.path.glob(f"*/{manifest.FILE}"))
        except OSError:
            return []


_manifests: dict[tuple[Folder, str], Manifest] = {}


def forget() -> None:
    """Forgets the manifests that were read."""
    _manifests.clear()


def named_folder() -> Folder | None:
    """Returns the folder that ``KDA_KERNEL_DIR`` names; None if it names none."""
    text = env.KDA_KERNEL_DIR.raw()
    return Folder(Path(text).expanduser(), env.KDA_KERNEL_DIR.name, trusted=False) if text else None


def installed_folders() -> list[Folder]:
    """Returns the folders of the installed packages with exported kernels. A package that cannot be found is skipped with a warning."""
    folders = []
    for extension in extensions.find(GROUP).values():
        package = extension.point.value
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.submodule_search_locations:
            storage.warn_once(
                (GROUP, package),
                "the kernels of %s are not used: there is no package %s",
                extension.distribution, package, log=logger,
            )  # fmt: skip
            continue
        folders.append(
            Folder(Path(next(iter(spec.submodule_search_locations))), extension.distribution, trusted=True)
        )
    return folders


@dataclass(frozen=True)
class KernelStore:
    """Finds exported kernels.

    Attributes:
        folders: in order of preference.
        driver: loads the kernels; None: that of this machine, which is loaded when a folder has a kernel.
    """

    folders: Sequence[Folder]
    driver: Driver | None = None

    @classmethod
    def of_this_process(cls) -> KernelStore:
        """Returns the store of the environment: the folder of ``KDA_KERNEL_DIR``, then the installed packages."""
        named = named_folder()
        return cls([*([] if named is None else [named]), *installed_folders()])

    def find(
        self, interface: KernelInterface, config: object, arch: str
    ) -> tuple[Callable[..., Any] | None, list[str]]:
        """Returns the callable of a kernel, and why folders before it were not used. The callable is None if no folder has the
        kernel. A kernel that exists and is not used is also a warning, once a process."""
        reasons: list[str] = []
        for folder in self.folders:
            try:
                return self._load(folder, interface, config, arch), reasons
            except Refused as error:
                reasons.append(str(error))
                if not isinstance(error, Absent):
                    storage.warn_once(
                        (GROUP, str(error)), "an exported kernel is not used: %s", error, log=logger
                    )
        return None, reasons

    def _load(
        self, folder: Folder, interface: KernelInterface, config: object, arch: str
    ) -> Callable[..., Any]:
        listed = folder.manifest(arch)
        kernel = listed.find(interface, config)
        for package in manifest.source_packages(interface):
            stated = listed.sources.get(package)  # None: the folder has no kernel of the package
            if (kernel or stated) and stated != manifest.source_digest(package):
                raise Refused(
                    f"{folder.path / arch / manifest.FILE} is not used: its kernels were compiled from other sources of "
                    f"{package} than are installed: export them again, or install the kernels of the same version"
                )
        if kernel is None:
            raise Absent(
                f"{folder.path / arch} has no kernel {interface.name} for {config} ({folder.origin})"
            )
        path = folder.path / arch / kernel.file
        if kernel.parameters != manifest.parameters(interface.arguments(config)):
            raise Refused(f"{path} is not used: its parameters are not those of {interface.name}")
        cubin = _unpacked(path, kernel, folder.read(arch, kernel.file))
        try:
            driver = self.driver or current()
            if (version := driver.version()) < listed.minimum_driver:
                raise Refused(
                    f"{path} is not used: it needs a driver for CUDA {_cuda(listed.minimum_driver)} or newer, "
                    f"and this one is for CUDA {_cuda(version)}"
                )
            loaded = Loaded.of(driver, cubin, kernel)
        except DriverError as error:
            raise Refused(f"{path} is not used: {error}") from error
        return Launcher(kernel, interface, config, lambda: loaded)


def _unpacked(path: Path, kernel: Exported, content: bytes) -> bytes:
    """Returns the cubin of a file whose content is checked first."""
    found = hashlib.sha256(content).hexdigest()
    if found != kernel.sha256:
        raise Refused(f"{path} is damaged: expected sha256 {kernel.sha256}, got {found}")
    try:
        cubin = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(content, max_length=kernel.bytes + 1)
    except lzma.LZMAError as error:
        raise Refused(f"{path} is damaged: {error}") from error
    if len(cubin) != kernel.bytes:
        raise Refused(f"{path} is damaged: expected a cubin of {kernel.bytes} bytes")
    return cubin


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


# ---- for `doctor`


def status() -> tuple[dict[str, str], list[str]]:
    """Returns what each folder holds, by its origin, and the problems of the folders. Every kernel is read and checked."""
    named = named_folder()
    facts, problems = {}, []
    for folder in [*([] if named is None else [named]), *installed_folders()]:
        lines = []
        for arch in folder.archs():
            try:
                listed = folder.manifest(arch)
                stale = sorted(
                    package
                    for package, digest in listed.sources.items()
                    if manifest.source_digest(package) != digest
                )
                for kernel in listed.kernels.values():
                    _unpacked(folder.path / arch / kernel.file, kernel, folder.read(arch, kernel.file))
            except Refused as error:
                lines.append(f"{arch}: {error}")
                problems.append(str(error))
                continue
            state = f"compiled from other sources of {', '.join(stale)}" if stale else "usable"
            lines.append(f"{arch}: {len(listed.kernels)} kernels, {state}")
            if stale and folder is named:
                problems.append(
                    f"the kernels in {folder.path / arch} are not used: {state}; export them again"
                )
        if not lines and folder is named:
            problems.append(
                f"{env.KDA_KERNEL_DIR.name}: {folder.path} holds no exported kernels: expected <architecture>/{manifest.FILE}"
            )
        facts[f"{folder.origin} {folder.path}"] = "; ".join(lines) or "no kernels"
    return facts, problems
