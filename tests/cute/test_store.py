"""Exported kernels: how they are found, checked and launched, and the calls that they serve without a compiler."""

from __future__ import annotations

import hashlib
import json
import logging
import lzma
import os
import re
import struct
import textwrap
import threading
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: no kernel could be compiled")

from helpers.exported_kernels import write
from helpers.fake_cuda import CONTEXT, STREAM, FakeDriver, OnDevice

from kda_core import backends, storage
from kda_core.cli import main
from kda_core.errors import ArgumentError, CompileError
from kda_cute import cache_info, clear_memory, get_kernel
from kda_cute.arguments import bound
from kda_cute.merge import MERGE, MergeConfig
from kda_cute.store import export, manifest, search
from kda_cute.store.driver import DriverError
from kda_cute.store.launcher import Launcher, LaunchError
from kda_cute.store.search import Folder, KernelStore

ARCH = "sm_90a"
CONFIG = MergeConfig(8)
ONE = MERGE, CONFIG, ARCH
VALUES = (0x1000, 0x2000, 0x3000, 0x4000, 5, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one exported kernel."""
    write(tmp_path / "kernels", ONE)
    clear_memory()
    return tmp_path / "kernels"


def find(folder: Path, driver: FakeDriver | None = None, config: MergeConfig = CONFIG, arch: str = ARCH):
    search.forget()
    storage.forget_warnings()
    store = KernelStore([Folder(folder, "KDA_KERNEL_DIR", trusted=False)], driver or FakeDriver())
    return store.find(MERGE, config, arch)


def change(folder: Path, **fields: object) -> None:
    """Changes fields of the manifest, or of its kernel."""
    path = folder / ARCH / manifest.FILE
    content = json.loads(path.read_text())
    for name, value in fields.items():
        (content if name in content else content["kernels"][0])[name] = value
    path.write_text(json.dumps(content))


def cubin_file(folder: Path) -> Path:
    (path,) = (folder / ARCH).glob("*.xz")
    return path


# ---- launches


def test_a_kernel_is_launched_with_its_arguments(folder):
    driver = FakeDriver(device=1)
    kernel, reasons = find(folder, driver)
    assert kernel is not None and not reasons
    kernel(OnDevice(1), *VALUES)
    kernel(OnDevice(1), *(2 * value for value in VALUES))
    first, second = driver.cuda.launches
    assert first.symbol.startswith("kernel_cutlass_kernel_kda_cutedevicemerge_states")
    assert (first.grid, first.block, first.shared_bytes) == ((5, 6, 16), (256, 1, 1), 16384)
    assert first.stream == STREAM + 1 and first.attributes == {}
    assert first.parameters == struct.pack("<4q2i", *VALUES)
    assert second.grid == (10, 12, 16)
    assert driver.cuda.attributes == [(8, 16384, 1, 101)]  # once
    assert driver.cuda.current == CONTEXT + 101  # the thread had no context


def test_threads_and_devices_do_not_share_memory(folder):
    driver = FakeDriver()
    driver.cuda.current = CONTEXT
    kernel, _ = find(folder, driver)

    def run(number: int) -> None:
        for n in range(50):
            kernel(OnDevice(number % 2), number, n, 0, 0, number + 1, n + 1)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.cuda.launches) == 200
    for launch in driver.cuda.launches:
        number, n, _, _, N, HV = struct.unpack("<4q2i", launch.parameters)
        assert launch.grid[:2] == (N, HV) == (number + 1, n + 1)
        assert launch.stream == STREAM + number % 2
    assert driver.cuda.current == CONTEXT


def test_the_last_values_of_a_launch_may_be_fixed(folder):
    driver = FakeDriver()
    kernel, _ = find(folder, driver)
    launch = bound(kernel, *VALUES[2:])
    assert not driver.cuda.launches  # nothing is launched yet

    def run(number: int) -> None:
        for n in range(50):
            launch(OnDevice(number % 2), (number, n))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kernel(OnDevice(), *VALUES)  # has memory of its own
    *launches, whole = driver.cuda.launches
    assert len(launches) == 200 and whole.parameters == struct.pack("<4q2i", *VALUES)
    found = sorted(struct.unpack("<4q2i", one.parameters) for one in launches)
    assert found == sorted((number, n, *VALUES[2:]) for number in range(4) for n in range(50))
    assert {one.grid for one in launches} == {whole.grid}
    assert {one.stream - STREAM for one in launches} == {0, 1}
    with pytest.raises(TypeError):
        bound(kernel, VALUES[-1])  # N, which is open, decides about the grid
    with pytest.raises(struct.error):
        launch(OnDevice(), (1,))
    calls = []
    bound(lambda *values: calls.append(values), 3, 4)("tensor", (1, 2))  # another callable gets all values
    assert calls == [("tensor", 1, 2, 3, 4)]


def test_a_compiled_kernel_has_the_same_launcher(cache_dir, monkeypatch):
    """It is loaded before its first launch, because this process uses no GPU when it is compiled."""
    drivers = []
    monkeypatch.setattr(export, "current", lambda: drivers.append(FakeDriver()) or drivers[-1])
    monkeypatch.delenv("KDA_KERNEL_DIR", raising=False)
    clear_memory()
    kernel = get_kernel(*ONE)
    assert isinstance(kernel, Launcher) and cache_info().exported == 0 and not drivers
    kernel(OnDevice(1), *VALUES)
    kernel(OnDevice(0), *VALUES)
    (driver,) = drivers
    assert [launch.parameters for launch in driver.cuda.launches] == [struct.pack("<4q2i", *VALUES)] * 2

    def missing():
        raise DriverError("the NVIDIA driver cannot be loaded: libcuda.so.1")

    monkeypatch.setattr(export, "current", missing)
    clear_memory()
    with pytest.raises(LaunchError, match=r"MergeKernel: the NVIDIA driver cannot be loaded: libcuda"):
        get_kernel(*ONE)(OnDevice(), *VALUES)


def test_errors_of_a_launch_name_the_kernel(folder):
    driver = FakeDriver()
    kernel, _ = find(folder, driver)
    with pytest.raises(LaunchError, match="MergeKernel: expected a CUDA tensor, got one on a CPU"):
        kernel(OnDevice(-1), *VALUES)
    driver.cuda.fails["cuLaunchKernelEx"] = 1
    with pytest.raises(
        LaunchError, match=r"MergeKernel: .*CUDA_ERROR_INVALID_VALUE; grid \[5, 6, 16\], 256 threads"
    ):
        kernel(OnDevice(), *VALUES)
    driver.cuda.fails["cuLaunchKernelEx"] = 999
    with pytest.raises(LaunchError, match="CUDA error 999"):
        kernel(OnDevice(), *VALUES)
    with pytest.raises(struct.error):
        kernel(OnDevice(), *VALUES[:-1])


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"schema": 1}, r"manifest.json is not used: schema 1; .* reads schema 2"),
        ({"arch": "sm_100a"}, r"manifest.json is not used: its kernels are for sm_100a"),
        ({"sources": {"kda_cute": "0"}}, r"manifest.json is not used: .* other sources of kda_cute than are installed"),
        ({"minimum_driver": 14020}, r"cubin.xz is not used: it needs a driver for CUDA 14.2 .* this one is for CUDA 13.0"),
        ({"sha256": "0"}, r"cubin.xz is damaged: expected sha256 0, got [0-9a-f]{64}"),
        ({"bytes": 7}, r"cubin.xz is damaged: expected a cubin of 7 bytes"),
        ({"file": "../x"}, r"manifest.json is not used: a file of a kernel is not in the folder"),
        ({"symbol": "x"}, r"cubin.xz is not used: cuLibraryGetKernel: CUDA error 500"),
        ({"parameters": [[]]}, r"cubin.xz is not used: its parameters are not those of MergeKernel"),
        ({"kernels": 3}, r"manifest.json is not used: damaged: TypeError"),
        ({"sources": {}}, r"manifest.json is not used: .* other sources of kda_cute than are installed"),
        ({"config": "another"}, r"has no kernel MergeKernel for MergeConfig\(columns=8\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_kernel_that_does_not_fit_is_refused(folder, fields, reason):
    change(folder, **fields)
    kernel, reasons = find(folder)
    assert kernel is None
    assert len(reasons) == 1 and str(folder / ARCH) in reasons[0]
    assert re.search(reason, reasons[0]), reasons[0]


def test_a_cubin_with_other_parameters_is_refused(folder):
    driver = FakeDriver()
    driver.cuda.parameters = [(0, 8)]
    kernel, (reason,) = find(folder, driver)
    assert kernel is None and "the driver finds 1 parameters at other places than the 6" in reason
    driver.cuda.parameters = [(8 * n, 8) for n in range(8)]  # no more than one too many is read
    kernel, (reason,) = find(folder, driver)
    assert kernel is None and "the driver finds 7 parameters" in reason
    driver.cuda.fails["cuKernelGetParamInfo"] = 201
    kernel, (reason,) = find(folder, driver)
    assert kernel is None and reason.endswith("cuKernelGetParamInfo: CUDA_ERROR_INVALID_CONTEXT")


def test_damaged_files_are_refused(folder):
    path = cubin_file(folder)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    _, (reason,) = find(folder)
    assert reason.startswith(f"{path} is damaged: expected sha256")
    packed = lzma.compress(b"not a cubin" * 50)
    path.write_bytes(packed)
    change(folder, sha256=hashlib.sha256(packed).hexdigest(), bytes=550)
    _, (reason,) = find(folder)
    assert reason == f"{path} is not used: cuLibraryLoadData: CUDA_ERROR_INVALID_IMAGE"
    path.unlink()
    _, (reason,) = find(folder)
    assert reason == f"{path} does not exist (KDA_KERNEL_DIR)"
    (folder / ARCH / manifest.FILE).write_text("{")
    _, (reason,) = find(folder)
    assert "manifest.json is not used: damaged: JSONDecodeError" in reason
    _, (reason,) = find(folder, arch="sm_100a")
    assert reason == f"{folder / 'sm_100a' / manifest.FILE} does not exist (KDA_KERNEL_DIR)"


@pytest.mark.parametrize("place", ["", ARCH, f"{ARCH}/{manifest.FILE}", "cubin"])
def test_what_others_may_write_is_not_loaded(folder, place, caplog):
    path = cubin_file(folder) if place == "cubin" else folder / place
    path.chmod(path.stat().st_mode | 0o022)
    driver = FakeDriver()
    kernel, (reason,) = find(folder, driver)
    assert kernel is None and f"{path} can be written by others" in reason
    assert not driver.cuda.kernels
    assert [record.getMessage() for record in caplog.records] == [f"an exported kernel is not used: {reason}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("place", ["", ARCH, f"{ARCH}/{manifest.FILE}", "cubin"])
def test_what_belongs_to_another_user_is_not_loaded(folder, place):
    path = cubin_file(folder) if place == "cubin" else folder / place
    os.chown(path, 12345, -1)
    kernel, (reason,) = find(folder)
    assert kernel is None and f"{path} belongs to uid 12345" in reason


def test_symbolic_links_are_not_followed(folder, tmp_path):
    path = cubin_file(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    kernel, (reason,) = find(folder)
    assert kernel is None and f"{path} is a symbolic link" in reason


def test_a_folder_without_kernels_of_a_package_says_so(folder):
    from kda_cute.gradients import GradientsConfig
    from kda_sm90.interfaces import GRADIENTS

    store = KernelStore([Folder(folder, "KDA_KERNEL_DIR", trusted=False)], FakeDriver())
    kernel, (reason,) = store.find(GRADIENTS, GradientsConfig(), ARCH)
    assert kernel is None
    assert re.fullmatch(rf"{folder / ARCH} has no kernel GradientsKernel for .* \(KDA_KERNEL_DIR\)", reason)


# ---- the order of the sources


def test_the_next_folder_serves_what_the_first_cannot(folder, tmp_path, caplog):
    write(tmp_path / "second", ONE)
    change(folder, sha256="0")
    folders = [Folder(path, "test", trusted=False) for path in (folder, tmp_path / "second")]
    storage.forget_warnings()
    driver = FakeDriver()
    kernel, reasons = KernelStore(folders, driver).find(*ONE)
    assert kernel is not None and len(reasons) == 1 and len(driver.cuda.kernels) == 1
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING


def test_get_kernel_prefers_the_folder_that_the_user_names(folder, cache_dir, monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(search, "current", lambda: driver)
    monkeypatch.setenv("KDA_KERNEL_DIR", str(folder))
    monkeypatch.setenv("KDA_DISABLE_JIT", "1")
    kernel = get_kernel(*ONE)
    assert get_kernel(*ONE) is kernel and cache_info().exported == 1
    kernel(OnDevice(), *VALUES)
    assert len(driver.cuda.launches) == 1 and not cache_dir.exists()
    with pytest.raises(ArgumentError, match="arch"):
        get_kernel(MERGE, CONFIG, "hopper")


def test_get_kernel_compiles_what_no_folder_has(folder, cache_dir, monkeypatch):
    monkeypatch.setattr(search, "current", lambda: FakeDriver())
    monkeypatch.setenv("KDA_KERNEL_DIR", str(folder))
    assert callable(get_kernel(MERGE, MergeConfig(16), ARCH))
    assert (cache_info().exported, cache_info().compiled) == (0, 1)
    clear_memory()
    monkeypatch.setenv("KDA_DISABLE_JIT", "1")
    monkeypatch.setenv("KDA_CACHE_DIR", str(cache_dir / "empty"))
    with pytest.raises(
        CompileError, match=r"forbids compiling it[\s\S]*not used:\n  .* has no kernel MergeKernel"
    ):
        get_kernel(MERGE, MergeConfig(16), ARCH)


def test_without_a_driver_the_next_source_serves(folder, monkeypatch):
    def missing():
        raise DriverError("the NVIDIA driver cannot be loaded: libcuda.so.1")

    monkeypatch.setattr(search, "current", missing)
    kernel, (reason,) = KernelStore([Folder(folder, "test", trusted=False)]).find(*ONE)
    assert kernel is None and reason.endswith("is not used: the NVIDIA driver cannot be loaded: libcuda.so.1")


def test_installed_packages_serve_after_the_named_folder(folder, install, monkeypatch, tmp_path):
    monkeypatch.delenv("KDA_KERNEL_DIR", raising=False)
    before = len(KernelStore.of_this_process().folders)
    distribution(tmp_path, folder)
    backends(refresh=True)  # reads the installed distributions again
    (found,) = KernelStore.of_this_process().folders[before:]
    assert found.trusted and found.origin == "fake-kernels 1.0" and found.archs() == [ARCH]
    assert found.manifest(ARCH).kernels
    monkeypatch.setenv("KDA_KERNEL_DIR", str(folder))
    folders = KernelStore.of_this_process().folders
    assert folders[0] == Folder(folder, "KDA_KERNEL_DIR", trusted=False) and found in folders


def distribution(place: Path, folder: Path) -> None:
    """Makes a distribution with the entry point of a package of kernels in a folder on sys.path."""
    package = place / "fake_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / ARCH).symlink_to(folder / ARCH)
    info = place / "fake_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kda_core.kernels]\nfake = fake_kernels\n")


def test_a_call_is_served_without_the_dsl(folder, python):
    """In a process in which the DSL cannot be imported, with a stand-in for the driver."""
    out = python(textwrap.dedent(WITHOUT_DSL), KDA_KERNEL_DIR=str(folder))
    grid, error = out.splitlines()
    assert grid == "(2, 3, 16) True"
    assert (
        error.startswith("the CuTe DSL cannot be imported")
        and "has no kernel MergeKernel for MergeConfig" in error
    )


WITHOUT_DSL = """
    import sys
    import torch


    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("cutlass", "tvm_ffi", "nvidia_cutlass_dsl"):
                raise ImportError(f"{name} is blocked")


    sys.meta_path.insert(0, Blocked())
    from helpers.fake_cuda import FakeDriver
    from kda_cute.host import merge_segments
    from kda_cute.store import search

    driver = FakeDriver()
    search.current = lambda: driver


    class OnGpu(torch.Tensor):
        def get_device(self):
            return 0


    states = torch.zeros(4, 3, 128, 128).as_subclass(OnGpu)
    bounds = torch.tensor([0, 2, 4], dtype=torch.int32)
    merge_segments(states, states, states, bounds, sms=132, arch="sm_90a")
    print(driver.cuda.launches[0].grid, "cutlass" not in sys.modules and "tvm_ffi" not in sys.modules)
    try:
        merge_segments(states, states, states, bounds, sms=1, arch="sm_90a")
    except RuntimeError as error:
        print(str(error).replace("\\n", " "))
"""


# ---- export and doctor


def test_doctor_shows_the_kernels_and_what_is_wrong_with_them(folder, monkeypatch, capsys):
    monkeypatch.setenv("KDA_KERNEL_DIR", str(folder))

    def report() -> tuple[str, list[str]]:
        search.forget()
        main(["doctor", "--json"])
        found = json.loads(capsys.readouterr().out)
        shown = found["diagnostics"]["cute"]["kernels"][f"KDA_KERNEL_DIR {folder}"]
        return shown, [problem for problem in found["problems"] if str(folder) in problem]

    assert report() == ("sm_90a: 1 kernels, usable", [])
    cubin = cubin_file(folder)
    content = cubin.read_bytes()
    cubin.write_bytes(content[:-1] + b"x")
    shown, (problem,) = report()
    assert "is damaged: expected sha256" in shown and str(cubin) in problem
    cubin.write_bytes(content)
    change(folder, sources={"kda_cute": "0"})
    shown, (problem,) = report()
    assert (
        shown == "sm_90a: 1 kernels, compiled from other sources of kda_cute"
        and "export them again" in problem
    )
    (folder / ARCH / manifest.FILE).chmod(0o666)
    shown, (problem,) = report()
    assert "can be written by others" in shown and "can be written by others" in problem
    (folder / ARCH / manifest.FILE).unlink()
    shown, (problem,) = report()
    assert shown == "no kernels" and "holds no exported kernels" in problem


def offered(arch: str) -> list[tuple[type, object]]:
    from helpers import demo_kernels

    from kda_cute.device.merge_states import MergeKernel

    return [(MergeKernel, CONFIG), *demo_kernels.sound()[:1]]


def test_precompile_exports_what_it_compiles(install, cache_dir, tmp_path, capsys, monkeypatch):
    install("merging", archs={(9, 0)}, variants=f"{__name__}:offered")
    command = [
        "precompile",
        "--arch",
        ARCH,
        "--backend",
        "merging",
        "--jobs",
        "1",
        "--export",
        str(tmp_path / "out"),
    ]
    assert main([*command, "--only", "MergeKernel"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 kernels, 0.0 MB, exported to ")
    kernel, reasons = find(tmp_path / "out")
    assert kernel is not None and not reasons
    listed = manifest.read((tmp_path / "out" / ARCH / manifest.FILE).read_bytes())
    assert "nvidia-cutlass-dsl" in listed.toolchain["wheels"] and listed.minimum_driver >= 12000
    assert main([*command, "--only", "MergeKernel"]) == 1
    assert "--export: expected a folder without sm_90a" in capsys.readouterr().err

    command[-1] = str(tmp_path / "other")
    assert main(command) == 1
    assert "cannot be exported: the class states no KernelInterface" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
