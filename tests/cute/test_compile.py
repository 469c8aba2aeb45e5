"""``get_kernel`` compiles once for each configuration and architecture, with threads, processes and damaged files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kda_core import env, storage
from kda_core.errors import ArgumentError, CompileError, JitDisabledError
from kda_cute import CacheInfo, arch_of_capability, cache_info, clear_memory, get_kernel, precompile
from kda_cute.jit import compile as compiling
from kda_cute.jit import housekeeping
from kda_cute.jit.ptxas import keep_ptx

ARCHS = ["sm_90a", "sm_100a"]

GET_ONE = """
from helpers import demo_kernels as kernels
from kda_cute import cache_info, get_kernel
function = get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
try:
    function()
except TypeError as error:
    assert "bfloat16" in str(error), error
print(cache_info().loaded, cache_info().compiled)
"""

#: Waits after the imports for all processes, so that their compilations would overlap.
RACE = """
import pathlib, sys, time
from helpers import demo_kernels as kernels
from kda_cute import cache_info, get_kernel
from kda_cute.jit.key import toolchain
toolchain()
folder = pathlib.Path({folder!r})
(folder / "ready{number}").touch()
while len(list(folder.glob("ready*"))) < {count}:
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


def test_kernels_can_be_made_for_an_instrument_instead_of_a_gpu(cache_dir, kernels):
    make = lambda ptx, content: [ptx, content]
    wanted = (kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    with compiling.kernels_made_by(make):
        found = get_kernel(*wanted)
        assert ".target sm_90a" in found[0] and found[1].startswith(b"\x7fELF")
        assert get_kernel(*wanted) is found
        clear_memory()
        assert get_kernel(*wanted) == found
    assert cache_info() == CacheInfo(loaded=1)
    (entry,) = housekeeping.entries(cache_dir)
    assert entry.name.startswith("RmsNorm-ptx.sm_90a.") and entry.stale is None
    assert callable(get_kernel(*wanted))
    assert cache_info() == CacheInfo(
        loaded=1, compiled=1
    )  # a GPU does not get what was made for the instrument


def test_each_variant_is_compiled_once(cache_dir, kernels):
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
    with pytest.raises(ArgumentError, match="expected sm_<number>"):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "hopper")
    assert cache_info() == CacheInfo()


def test_an_architecture_that_the_dsl_lacks_is_a_clear_error(cache_dir, kernels):
    with pytest.raises(CompileError, match="the installed CuTe DSL does not support sm_130a"):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_130a")


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
    """They compile one after the other, because the DSL's compiler is not thread-safe."""
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
    assert entry.read() == b""
    with pytest.raises(CompileError, match="cannot be loaded"):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")


#: Root may write anywhere, so the capability to ignore permissions is dropped first.
READ_ONLY = """
import ctypes, logging.handlers, queue
from helpers import demo_kernels as kernels
from kda_cute import cache_info, get_kernel
header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None, use_errno=True).capset(header, nothing) == 0
logged = queue.Queue()
logging.getLogger("kda_cute").addHandler(logging.handlers.QueueHandler(logged))
for dim in (128, 64, 32):
    function = get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=dim), "sm_90a")
    try:
        function()
    except TypeError as error:
        assert f"[n0, {dim}]" in str(error), error
print(cache_info().loaded, cache_info().compiled, [record.getMessage() for record in logged.queue])
"""


@pytest.mark.parametrize("filled", [True, False])
def test_read_only_folder(cache_dir, kernels, python, filled):
    """Cached kernels load, other kernels compile in memory, with one warning."""
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


#: Compiles one kernel or none; then its sources change on disk; then compiles another one.
UPGRADE = """
import pathlib, sys, time
import upgraded_kernels as kernels
from kda_cute import cache_info, get_kernel
if sys.argv[1:] == ["late"]:
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=128), "sm_90a")
path = pathlib.Path(kernels.__file__)
now, probe = time.time_ns(), path.with_name("probe")
probe.touch()
while probe.stat().st_ctime_ns <= now:  # the file system's clock may tick every 10 ms
    probe.touch()
path.write_text("# a new version\\n\\n" + path.read_text().replace("tidx // WARP", "no_such_name // WARP"))
try:
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=64), "sm_90a")()
except TypeError as error:
    assert "[n0, 64]" in str(error), error
print(cache_info().loaded, cache_info().compiled)
"""


def test_an_upgrade_under_a_process_does_not_poison_the_cache(cache_dir, kernels, tmp_path):
    """The new text is neither compiled into the running process nor stored under the old key."""
    module = tmp_path / "upgraded_kernels.py"
    module.write_text(Path(kernels.__file__).read_text())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-c", UPGRADE, "late"]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.stdout.split() == ["0", "2"], done.stderr
    assert f"{module} changed while this process ran" in done.stderr and "Restart this process" in done.stderr
    assert len(list(cache_dir.glob("*.o"))) == 1


def test_an_upgrade_before_the_first_kernel_does_not_poison_the_cache(cache_dir, kernels, tmp_path):
    module = tmp_path / "upgraded_kernels.py"
    module.write_text(Path(kernels.__file__).read_text())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    code = UPGRADE.replace("no_such_name // WARP", "tidx // 16").replace('"# a new version\\n\\n" + ', "")
    command = [sys.executable, "-c", code, "early"]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.stdout.split() == ["0", "1"], done.stderr
    assert f"{module} changed after this process began to import kernels" in done.stderr
    assert not list(cache_dir.glob("*.o"))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A temporary folder of the system for this test alone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_folder_that_cannot_be_made_is_replaced_by_a_private_one(cache_dir, kernels, temporary, caplog):
    cache_dir.write_text("a file is in the way")
    function = get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    with pytest.raises(TypeError, match="bfloat16"):
        function()
    clear_memory()
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    assert cache_info() == CacheInfo(loaded=1)
    assert len(list(temporary.glob("kda-core-*/*.o"))) == 1
    assert "The folder that KDA_CACHE_DIR names is not used" in caplog.text


@pytest.mark.parametrize("how", ["mode", "owner"])
def test_no_kernel_is_loaded_from_a_folder_that_others_may_write(
    cache_dir, kernels, temporary, caplog, monkeypatch, how
):
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    clear_memory()
    if how == "mode":
        cache_dir.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(cache_dir, 65534, 65534)
    else:
        pytest.skip("only root can give a folder away")
    files = sorted(cache_dir.iterdir())
    monkeypatch.setenv("KDA_DISABLE_JIT", "1")
    with pytest.raises(JitDisabledError, match=f"KDA_CACHE_DIR names is not used: {cache_dir} "):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    monkeypatch.delenv("KDA_DISABLE_JIT")
    with pytest.raises(TypeError, match="bfloat16"):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")()
    assert cache_info() == CacheInfo(compiled=1)
    assert sorted(cache_dir.iterdir()) == files
    assert len(list(temporary.glob("kda-core-*/*.o"))) == 1
    assert caplog.text.count("The folder that KDA_CACHE_DIR names is not used") == 1


def test_a_full_disk_costs_one_compilation(cache_dir, kernels, monkeypatch, caplog):
    """No file can be written anywhere, and the call still works."""
    cache_dir.mkdir(mode=0o700)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    for dim in (128, 64):
        with pytest.raises(TypeError, match=rf"\[n0, {dim}\]"):
            get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=dim), "sm_90a")()
    assert cache_info() == CacheInfo(compiled=2)
    assert caplog.text.count("No space left") == 1
    assert {path.suffix for path in cache_dir.iterdir()} <= {".lock"}


def test_a_lock_that_is_never_released_costs_one_compilation(cache_dir, kernels, monkeypatch, caplog):
    short = storage.Patience(notice_s=0.01, limit_s=0.02)
    entry = compiling.entry_of(compiling.Variant(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a"))
    with entry.locked():
        monkeypatch.setattr(storage, "Patience", lambda: short)
        with pytest.raises(TypeError, match="bfloat16"):
            get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")()
    assert cache_info() == CacheInfo(compiled=1) and entry.read() is None
    assert f"waiting for process {os.getpid()}, which holds the lock" in caplog.text
    assert "has held the lock" in caplog.text


def test_the_first_compilation_is_announced_once(cache_dir, kernels, caplog):
    caplog.set_level("INFO", logger="kda_cute")
    for dim in (128, 64):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=dim), "sm_90a")
    warning, _, info, _ = caplog.records
    assert (warning.levelname, warning.name) == ("WARNING", "kda_cute")
    for word in (f"compiling RmsNorm(dim=128, weighted=True) for sm_90a into {cache_dir}, which takes seconds",
                 f"KDA_CACHE_DIR={cache_dir} python -m kda_core precompile --arch sm_90a"):  # fmt: skip
        assert word in warning.getMessage()
    assert info.levelname == "INFO" and "compiling RmsNorm(dim=64" in info.getMessage()
    clear_memory()
    caplog.clear()
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    assert not caplog.records  # a load is not announced


def test_a_cached_kernel_loads_while_another_one_compiles(cache_dir, kernels, monkeypatch):
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    clear_memory()
    compiling_now, go_on = threading.Event(), threading.Event()
    fake_args = kernels.RmsNorm.fake_args

    def wait(kernel):  # called by `trace`, which holds the compiler's lock
        compiling_now.set()
        go_on.wait()
        return fake_args(kernel)

    monkeypatch.setattr(kernels.RmsNorm, "fake_args", wait)
    slow = threading.Thread(target=get_kernel, args=(kernels.RmsNorm, kernels.RmsConfig(dim=64), "sm_90a"))
    slow.start()
    try:
        compiling_now.wait()
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
        assert cache_info() == CacheInfo(loaded=1) and slow.is_alive()
    finally:
        go_on.set()
        slow.join()
    assert cache_info() == CacheInfo(loaded=1, compiled=1)


def test_loading_and_compiling_at_once(cache_dir, kernels):
    """The DSL's loader and its compiler run concurrently, and the functions work."""
    dims = (32, 64, 96, 128)
    for dim in dims:
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=dim), "sm_90a")
    clear_memory()
    start, found = threading.Barrier(8), {}

    def get(dim, arch):
        start.wait()
        found[dim, arch] = get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=dim), arch)

    threads = [threading.Thread(target=get, args=(dim, arch)) for dim in dims for arch in ARCHS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache_info() == CacheInfo(loaded=4, compiled=4)
    for (dim, _), function in found.items():
        with pytest.raises(TypeError, match=rf"\[n0, {dim}\]"):
            function()


#: Forks while another thread is inside the compiler.
FORK = """
import os, threading
from helpers import demo_kernels as kernels
from kda_cute import cache_info, get_kernel
inside, go_on, parent = threading.Event(), threading.Event(), os.getpid()
fake_args = kernels.RmsNorm.fake_args
def wait(kernel):
    inside.set()
    if os.getpid() == parent:
        go_on.wait()
    return fake_args(kernel)
kernels.RmsNorm.fake_args = wait
thread = threading.Thread(target=get_kernel, args=(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a"))
thread.start()
inside.wait()
child = os.fork()
for dim in () if child else (64, 128):  # another variant, and the one whose file lock the parent holds
    if dim == 128:
        os.environ["KDA_CACHE_DIR"] += "-of-the-child"
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=dim), "sm_90a")
if not child:
    os._exit(cache_info().compiled)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
go_on.set()
thread.join()
print(status, cache_info().compiled)
"""


def test_a_child_forked_during_a_compilation_can_compile(cache_dir, kernels, python):
    assert python(FORK).split() == ["2", "1"]


def test_disable_jit(cache_dir, kernels, monkeypatch):
    monkeypatch.setenv("KDA_DISABLE_JIT", "1")
    with pytest.raises(JitDisabledError) as caught:
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=64), "sm_100a")
    assert "RmsNorm(dim=64, weighted=True) for sm_100a" in str(caught.value)
    assert "KDA_DISABLE_JIT=1" in str(caught.value)
    assert str(cache_dir) in str(caught.value)
    assert not cache_dir.exists()


def test_disable_jit_says_why_the_stored_kernel_is_not_used(cache_dir, kernels, monkeypatch):
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
    (path,) = cache_dir.glob("*.o")
    path.chmod(0o666)
    monkeypatch.setenv("KDA_DISABLE_JIT", "1")
    for _ in range(2):  # the file has been moved before the second call
        clear_memory()
        with pytest.raises(JitDisabledError) as caught:
            get_kernel(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")
        assert f"moved to {cache_dir / 'quarantine'}: {path} can be written by others" in str(caught.value)


def test_disable_jit_names_the_ingredients_that_differ(cache_dir, kernels, monkeypatch):
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
    for _ in range(2):  # a failure is not cached and does not affect the next kernel
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
    """A configuration, and a class that is never compiled."""


@pytest.mark.parametrize("module", ["cutlass.cute", "tvm_ffi"])
def test_a_missing_dsl_is_an_error_with_the_command_that_installs_it(cache_dir, monkeypatch, module):
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
    with pytest.raises(CompileError, match=f"nothing was compiled: .*KDA_CACHE_DIR.*{cache_dir}"):
        precompile([(kernels.RmsNorm, kernels.RmsConfig(), "sm_90a")])


def test_an_interrupted_precompile_keeps_finished_kernels(cache_dir, kernels):
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
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return None
    return arch_of_capability(torch.cuda.get_device_capability())


on_gpu = pytest.mark.skipif(
    gpu_arch() is None and not env.require_arch(),
    reason="needs a GPU of compute capability 9.0 or later: RmsNorm was compiled and loaded, but never run",
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
