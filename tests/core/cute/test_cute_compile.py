"""``get_kernel``: compiled once per configuration and architecture, among threads, processes and damaged
files."""

from __future__ import annotations

import json
import sys
import threading
import warnings
from dataclasses import dataclass

import pytest
import torch

from kda_core import env
from kda_core.cute import CacheInfo, arch_of_capability, cache_info, clear_memory, get_kernel, precompile
from kda_core.cute import compile as compiling
from kda_core.cute.ptxas import keep_ptx
from kda_core.errors import ArgumentError, CompileError, JitDisabledError

ARCHS = ["sm_90a", "sm_100a"]

GET_ONE = """
import cute_demo_kernels as kernels
from kda_core.cute import cache_info, get_kernel
function = get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
try:
    function()
except TypeError as error:
    assert "bfloat16" in str(error), error
print(cache_info().loaded, cache_info().compiled)
"""

#: Waits after the imports until all are there, so that the compilations would overlap.
RACE = """
import pathlib, sys, time
import cute_demo_kernels as kernels
from kda_core.cute import cache_info, get_kernel
from kda_core.cute.key import toolchain
toolchain()
folder = pathlib.Path({folder!r})
(folder / "ready{number}").touch()
deadline = time.monotonic() + 60
while len(list(folder.glob("ready*"))) < {count}:
    assert time.monotonic() < deadline
    time.sleep(0.005)
function = get_kernel(kernels.Spill, kernels.SpillConfig(values=256), "sm_90a")
try:
    function()
except TypeError as error:
    assert "float32" in str(error), error
print(cache_info().loaded, cache_info().compiled)
"""


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("weighted", [True, False])
def test_compiles_without_a_gpu(cache_dir, kernels, arch, weighted):
    function = get_kernel(kernels.RmsNorm, kernels.RmsConfig(weighted=weighted), arch)
    # The compiled argument checks run here too: T is symbolic, K is not, and an absent weight is None.
    with pytest.raises(
        TypeError, match=r"x: Tensor\(\[n0, 128\], bfloat16\), w: " + ("T" if weighted else "None")
    ):
        function()
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        function(x, torch.ones(128) if weighted else None, x, 1e-5)
    assert cache_info() == CacheInfo(compiled=1)


@pytest.mark.parametrize("arch", [*ARCHS, "sm_103a"])
def test_the_code_is_for_the_architecture(kernels, arch):
    assert f".target {arch}" in keep_ptx(kernels.RmsNorm, kernels.RmsConfig(), arch)


def test_kernels_can_be_made_for_elsewhere(cache_dir, kernels):
    make = lambda compiled: [compiled.__ptx__]
    wanted = (kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    with compiling.kernels_made_by(make):
        found = get_kernel(*wanted)
        assert ".target sm_90a" in found[0]
        assert get_kernel(*wanted) is found
    assert cache_info() == CacheInfo() and not list(cache_dir.glob("*.o"))
    assert callable(get_kernel(*wanted))


def test_the_kernel_is_compiled_once_per_variant(cache_dir, kernels):
    variants = [
        (kernels.RmsConfig(), "sm_90a"),
        (kernels.RmsConfig(dim=64), "sm_90a"),
        (kernels.RmsConfig(), "sm_100a"),
    ]
    first = [get_kernel(kernels.RmsNorm, config, arch) for config, arch in variants]
    again = [get_kernel(kernels.RmsNorm, config, arch) for config, arch in variants]
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert cache_info() == CacheInfo(compiled=3)
    assert len(list(cache_dir.glob("*.o"))) == len(list(cache_dir.glob("*.json"))) == 3
    clear_memory()
    for config, arch in variants:
        get_kernel(kernels.RmsNorm, config, arch)
    assert cache_info() == CacheInfo(loaded=3)


def test_invalid_variants_are_refused_before_compiling(cache_dir, kernels):
    with pytest.raises(ArgumentError, match=r"config\.dim"):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=[128]), "sm_90a")
    with pytest.raises(ArgumentError, match="one of sm_90a"):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90")
    assert cache_info() == CacheInfo()


def test_another_process_loads_without_compiling(cache_dir, kernels, python):
    assert python(GET_ONE, PYTHONHASHSEED="1").split() == ["0", "1"]
    files = {path.name: path.stat().st_mtime_ns for path in cache_dir.iterdir()}
    assert python(GET_ONE, PYTHONHASHSEED="2", KDA_DISABLE_JIT="1").split() == ["1", "0"]
    assert {path.name: path.stat().st_mtime_ns for path in cache_dir.iterdir()} == files


def test_racing_processes_compile_once(cache_dir, kernels, start_python, tmp_path):
    count = 3
    codes = [RACE.format(folder=str(tmp_path), number=number, count=count) for number in range(count)]
    processes = [start_python(code) for code in codes]
    results = []
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        results.append(output.split())
    assert sorted(results) == [["0", "1"], ["1", "0"], ["1", "0"]]


def test_racing_threads_compile_once(cache_dir, kernels):
    start, found = threading.Barrier(4), []

    def get():
        start.wait()
        found.append(get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a"))

    threads = [threading.Thread(target=get) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(function is found[0] for function in found)
    assert cache_info() == CacheInfo(compiled=1)


def test_threads_may_compile_different_kernels(cache_dir, kernels):
    """The DSL's compiler is not thread-safe, so they take turns."""
    start, found = threading.Barrier(4), {}

    def get(dim):
        start.wait()
        found[dim] = get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=dim), "sm_100a")

    threads = [threading.Thread(target=get, args=(dim,)) for dim in (32, 64, 96, 128)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache_info() == CacheInfo(compiled=4)
    for dim, function in found.items():
        with pytest.raises(TypeError, match=rf"\[n0, {dim}\]"):
            function()


@pytest.mark.parametrize("suffix", [".o", ".json"])
@pytest.mark.parametrize("kept", [0, 100])
def test_damaged_entries_are_replaced(cache_dir, kernels, suffix, kept):
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    clear_memory()
    (path,) = cache_dir.glob("*" + suffix)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(TypeError, match="bfloat16"):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")()
    assert cache_info() == CacheInfo(compiled=1, replaced=1)
    clear_memory()
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    assert cache_info() == CacheInfo(loaded=1)


def test_an_object_without_its_commit_marker_is_not_used(cache_dir, kernels):
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    clear_memory()
    next(cache_dir.glob("*.json")).unlink()
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    assert cache_info() == CacheInfo(compiled=1)


def test_a_sound_object_that_cannot_be_linked_is_an_error(cache_dir, kernels):
    """Damage is replaced, but a broken runtime must not lead to a compilation in every process."""
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    clear_memory()
    entry = compiling.entry_of(compiling.Variant(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a"))
    entry.commit(b"")
    with pytest.raises(CompileError, match="cannot be loaded"):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")


#: Root may write anywhere, so the capability to ignore permissions is dropped first.
READ_ONLY = """
import ctypes, warnings
import cute_demo_kernels as kernels
from kda_core.cute import cache_info, get_kernel
header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None, use_errno=True).capset(header, nothing) == 0
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for dim in (128, 64, 32):
        function = get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=dim), "sm_90a")
        try:
            function()
        except TypeError as error:
            assert f"[n0, {dim}]" in str(error), error
print(cache_info().loaded, cache_info().compiled, [str(item.message) for item in caught])
"""


@pytest.mark.parametrize("filled", [True, False])
def test_read_only_folder(cache_dir, kernels, python, filled):
    """What is there is used, the rest is compiled in memory, and one warning says so."""
    if filled:
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=128), "sm_90a")
    cache_dir.mkdir(exist_ok=True)
    files = sorted(cache_dir.iterdir())
    cache_dir.chmod(0o500)
    try:
        loaded, compiled, caught = python(READ_ONLY).split(maxsplit=2)
    finally:
        cache_dir.chmod(0o700)
    assert (loaded, compiled) == (("1", "2") if filled else ("0", "3"))
    assert len(eval(caught)) == 1
    assert f"cannot be stored in {cache_dir}" in caught
    assert sorted(cache_dir.iterdir()) == files


def test_a_folder_that_cannot_be_made(cache_dir, kernels, monkeypatch):
    cache_dir.write_text("a file is in the way")
    with pytest.warns(RuntimeWarning, match="every process compiles them again"):
        function = get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    with pytest.raises(TypeError, match="bfloat16"):
        function()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=64), "sm_90a")
    assert cache_info() == CacheInfo(compiled=2)


def test_a_full_disk_costs_one_compilation(cache_dir, kernels, monkeypatch):
    def full(entry, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kda_core.cute.cache.Entry.commit", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    assert cache_info() == CacheInfo(compiled=1)


def test_disable_jit(cache_dir, kernels, monkeypatch):
    monkeypatch.setenv("KDA_DISABLE_JIT", "1")
    with pytest.raises(JitDisabledError) as caught:
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=64), "sm_100a")
    assert "RmsNorm(dim=64, weighted=True) for sm_100a" in str(caught.value)
    assert "KDA_DISABLE_JIT=1" in str(caught.value)
    assert str(cache_dir) in str(caught.value)
    assert not cache_dir.exists()


def test_disable_jit_tells_what_a_cached_kernel_differs_in(cache_dir, kernels, monkeypatch):
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    clear_memory()
    (path,) = cache_dir.glob("*.json")
    metadata = json.loads(path.read_text())
    metadata["ingredients"]["cpu"] = "another"
    path.write_text(json.dumps(metadata))
    path.rename(path.with_name("RmsNorm.sm_90a.0000.json"))
    monkeypatch.setenv("KDA_DISABLE_JIT", "1")
    with pytest.raises(JitDisabledError, match=r"RmsNorm\.sm_90a\.0000\.json differs in cpu"):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")


def test_a_kernel_that_does_not_compile(cache_dir, kernels):
    for _ in range(2):  # a failure is not remembered, and does not stand in the way of the next kernel
        with pytest.raises(CompileError, match=r"Broken\(values=512\) for sm_90a did not compile") as caught:
            get_kernel(kernels.Broken, kernels.SpillConfig(), "sm_90a")
    assert "no_such_name" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert caught.value.__cause__ is not None
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    assert cache_info() == CacheInfo(compiled=1)
    assert len(list(cache_dir.glob("*.o"))) == 1


@dataclass(frozen=True)
class Unbuilt:
    """A configuration, and a class that no compiler will see."""


@pytest.mark.parametrize("module", ["cutlass.cute", "tvm_ffi"])
def test_without_the_dsl(cache_dir, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CompileError, match=r"pip install 'nvidia-cutlass-dsl\[cu13\]' apache-tvm-ffi"):
        get_kernel(Unbuilt, Unbuilt(), "sm_90a")


def test_precompile(cache_dir, kernels, monkeypatch):
    monkeypatch.setenv("KDA_DISABLE_JIT", "1")
    configs = [kernels.RmsConfig(dim=dim) for dim in (64, 128)]
    variants = [(kernels.RmsNorm, config, arch) for config in configs for arch in ARCHS]
    seen = []
    built = precompile([*variants, variants[0]], workers=2, progress=seen.append)
    assert sorted(built, key=str) == sorted(seen, key=str)
    assert len(built) == len(list(cache_dir.glob("*.o"))) == 4
    assert all(one.compiled and one.seconds > 0 for one in built)
    for kernel, config, arch in variants:
        get_kernel(kernel, config, arch)
    assert cache_info() == CacheInfo(loaded=4)


def test_precompile_builds_the_rest_when_one_fails(cache_dir, kernels):
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    variants = [
        (kernels.Broken, kernels.SpillConfig(), "sm_90a"),
        (kernels.RmsNorm, kernels.RmsConfig(), "sm_90a"),
        (kernels.RmsNorm, kernels.RmsConfig(), "sm_100a"),
    ]
    seen = []
    with pytest.raises(CompileError, match=r"(?s)1 of 3 kernels did not compile:\nBroken.*no_such_name"):
        precompile(variants, workers=1, progress=seen.append)
    outcomes = {one.name: (one.compiled, bool(one.error)) for one in seen}
    assert outcomes == {
        "Broken(values=512) for sm_90a": (False, True),
        "RmsNorm(dim=128, weighted=True) for sm_90a": (False, False),
        "RmsNorm(dim=128, weighted=True) for sm_100a": (True, False),
    }


def test_precompile_into_a_folder_that_cannot_be_made(cache_dir, kernels):
    """The kernels would be lost, so this is an error and not a warning."""
    cache_dir.write_text("a file is in the way")
    with pytest.raises(CompileError, match=f"FileExistsError.*{cache_dir}"):
        precompile([(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")])


def test_an_interrupted_precompile_leaves_the_rest(cache_dir, kernels):
    def interrupt(built):
        raise KeyboardInterrupt

    variants = [(kernels.RmsNorm, kernels.RmsConfig(dim=32 * n), "sm_90a") for n in range(1, 13)]
    with pytest.raises(KeyboardInterrupt):
        precompile(variants, workers=1, progress=interrupt)
    assert 1 <= len(list(cache_dir.glob("*.json"))) < len(variants)


def test_precompile_of_nothing(cache_dir):
    assert precompile([]) == []


def gpu_arch() -> str | None:
    """The architecture of the current GPU, None if there is no GPU that these kernels are compiled for."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() not in {(9, 0), (10, 0), (10, 3)}:
        return None
    return arch_of_capability(torch.cuda.get_device_capability())


on_gpu = pytest.mark.skipif(
    gpu_arch() is None and not env.require_arch(),
    reason="needs a GPU of sm_90a, sm_100a or sm_103a: RmsNorm was compiled and loaded, but never run",
)


def rms_norm(x, w, eps):
    wide = x.double()
    scaled = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return scaled if w is None else scaled * w.double()


@on_gpu
@pytest.mark.parametrize("weighted", [True, False])
def test_numbers(cache_dir, kernels, weighted):
    torch.manual_seed(0)
    w = torch.randn(128, device="cuda") if weighted else None
    for rows in (1, 5, 1000):
        function = get_kernel(kernels.RmsNorm, kernels.RmsConfig(weighted=weighted), gpu_arch())
        x = torch.randn(rows, 128, device="cuda").bfloat16()
        y = torch.full_like(x, float("nan"))
        function(x, w, y, 1e-5)
        # bfloat16 keeps 8 bits: half a unit in the last place is 2^-9 of the value.
        torch.testing.assert_close(y.double(), rms_norm(x, w, 1e-5), rtol=2**-8, atol=1e-6)
    assert cache_info() == CacheInfo(compiled=1)


@on_gpu
def test_runs_on_torchs_current_stream(cache_dir, kernels):
    """A CUDA graph records what runs on the capturing stream, and capture fails on anything that
    synchronises."""
    function = get_kernel(kernels.RmsNorm, kernels.RmsConfig(weighted=False), gpu_arch())
    x = torch.randn(64, 128, device="cuda").bfloat16()
    y = torch.empty_like(x)
    function(x, None, y, 1e-5)  # loads the module, which a capture may not do
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(x, None, y, 1e-5)
    x.copy_(torch.randn(64, 128, device="cuda"))
    y.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(y.double(), rms_norm(x, None, 1e-5), rtol=2**-8, atol=1e-6)


@on_gpu
def test_arguments_are_checked(cache_dir, kernels):
    function = get_kernel(kernels.RmsNorm, kernels.RmsConfig(weighted=False), gpu_arch())
    x = torch.randn(64, 128, device="cuda").bfloat16()
    for bad in (x.float(), x[:, :64], x[0], torch.empty(63, 128, device="cuda", dtype=torch.bfloat16)):
        with pytest.raises((ValueError, TypeError), match="Mismatched"):
            function(x, None, bad, 1e-5)
