"""``python -m kda_core precompile`` compiles the variants of installed backends, and an error that names the command."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kda_core.cli import main
from kda_core.errors import JitDisabledError
from kda_cute import cache_info, clear_memory, get_kernel

ARCH = "sm_90a"
COMMAND = ["precompile", "--arch", ARCH, "--backend", "demo"]


@pytest.fixture
def demo(install, kernels, cache_dir):
    """Installs a backend whose variants a function of the demonstration kernels' module returns."""

    def install_demo(function="offered", name="demo", **spec):
        install(name, archs={(9, 0), (10, 0)}, variants=f"{kernels.__name__}:{function}", **spec)

    return install_demo


def objects(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.o"))


def test_every_variant_is_compiled_once(demo, kernels, cache_dir, capsys, monkeypatch):
    demo()
    assert main([*COMMAND, "--jobs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"kernels for sm_90a, in {cache_dir}"
    assert lines[1] == "  demo  4 variants; others compile when a call first needs them"
    shown = [re.fullmatch(r"\[(\d)/4\] +\d+\.\d s  compiled +(.+)", line) for line in lines[2:-1]]
    assert [int(match[1]) for match in shown] == [1, 2, 3, 4]
    names = [f"RmsNorm(dim={c.dim}, weighted={c.weighted}) for sm_90a" for _, c in kernels.sound()]
    assert sorted(match[2] for match in shown) == sorted(names)
    assert re.fullmatch(r"4 variants in .* s: 4 compiled, 0 already on disk, 0 failed", lines[-1])
    stored = objects(cache_dir)
    assert len(stored) == 4

    assert main([*COMMAND, "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("already on disk  RmsNorm") == 4
    assert ": 0 compiled, 4 already on disk, 0 failed" in out
    assert objects(cache_dir) == stored

    monkeypatch.setenv("KDA_DISABLE_JIT", "1")
    for kernel, config in kernels.sound():
        get_kernel(kernel, config, ARCH)
    assert cache_info().loaded == 4


def test_a_failure_is_reported_and_stops_no_other_variant(demo, cache_dir, capsys):
    demo("offered_and_broken")
    assert main([*COMMAND, "--jobs", "1"]) == 1
    out, err = capsys.readouterr()
    assert re.search(r"s  FAILED +Broken\(values=512\) for sm_90a", out)
    assert ": 2 compiled, 0 already on disk, 1 failed" in out
    assert "1 of 3 kernels did not compile:\nBroken(values=512) for sm_90a did not compile" in err
    assert "no_such_name" in err
    assert len(objects(cache_dir)) == 2


def test_list_compiles_nothing(demo, cache_dir, capsys):
    demo()
    assert main([*COMMAND, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4 and "RmsNorm(dim=64, weighted=False) for sm_90a" in lines
    assert not cache_dir.exists()


def test_only_selects_by_a_part_of_the_name(demo, capsys):
    demo()
    assert main([*COMMAND, "--list", "--only", "dim=64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 of 4 variants" in lines[1] and len(lines) == 2 + 2
    assert main([*COMMAND, "--only", "dim=65"]) == 1
    assert "--only: expected a part of the name of one of 4 variants" in capsys.readouterr().err


def test_cached_selects_what_the_cache_folder_has(demo, cache_dir, capsys):
    demo()
    assert main([*COMMAND, "--cached"]) == 1
    assert "no variant of 4 is in the cache folder" in capsys.readouterr().err
    assert main([*COMMAND, "--only", "dim=64"]) == 0
    stored = objects(cache_dir)
    capsys.readouterr()
    assert main([*COMMAND, "--cached"]) == 0
    out = capsys.readouterr().out
    assert "2 of 4 variants" in out and ": 0 compiled, 2 already on disk, 0 failed" in out
    assert objects(cache_dir) == stored


def test_every_backend_is_listed_with_its_variants_or_the_reason_for_none(demo, install, capsys):
    demo()
    demo(name="second", function="offered_and_broken")
    install("elsewhere", archs={(10, 3)}, variants="a_module_that_is_not_there:kernels")
    install("empty", archs={(9, 0)}, unavailable="no kernel yet")
    install("first", abi=(2, 0))  # the field `variants` did not exist yet
    main(["precompile", "--arch", ARCH, "--list", "--only", "RmsNorm"])
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert lines["demo"].split()[1:3] == ["4", "variants;"]
    assert lines["second"].split()[1:5] == ["2", "of", "3", "variants;"]
    assert lines["elsewhere"].endswith("runs on sm_103")
    assert lines["empty"].endswith("no kernel yet")
    assert lines["first"].endswith("runs on cpu")
    assert lines["reference"].endswith("nothing to compile")
    assert out.count("\nRmsNorm(") == 4 + 2


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"variants": "a_module_that_is_not_there:kernels"}, "No module named 'a_module_that_is_not_there'"),
        ({"variants": "helpers.demo_kernels:no_such_function"}, "no_such_function"),
        ({"variants": "helpers.demo_kernels:spilling"}, "TypeError"),  # takes no architecture
        (
            {"variants": "helpers.demo_kernels"},
            "variants is 'helpers.demo_kernels', not 'package.module:callable'",
        ),
        ({"variants": "sys:exit"}, "sys:exit failed: SystemExit: sm_90a"),
        (
            {"variants": "helpers.demo_kernels:offered", "abi": (2, 99)},
            "install a newer kda-core: pip install ./",
        ),
    ],
)
def test_a_broken_backend_is_an_error_and_affects_no_other(demo, install, capsys, spec, reason):
    demo()
    install("bad", archs={(9, 0)}, **spec)
    assert main(["precompile", "--arch", ARCH, "--list"]) == 1
    out, err = capsys.readouterr()
    assert re.search(r"backend bad is (broken|abi-mismatch): ", err) and reason in err
    assert "\nRmsNorm(dim=64, weighted=True) for sm_90a" in out
    assert main([*COMMAND, "--list"]) == 0  # the named backend is sound


def test_nothing_to_compile_is_an_error(install, capsys):
    install("plain", archs={(9, 0)})
    assert main(["precompile", "--arch", ARCH, "--backend", "plain"]) == 1
    out, err = capsys.readouterr()
    assert "plain  nothing to compile" in out and err == "nothing to compile for sm_90a\n"


#: SIGINT may be ignored where the tests run in the background.
INTERRUPTIBLE = """
import signal, sys
from kda_core.cli import main
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
"""


def test_an_interrupt_ends_with_one_line_and_stops_the_workers(demo, cache_dir, tmp_path):
    demo("many")
    script = tmp_path / "interruptible.py"
    script.write_text(INTERRUPTIBLE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, str(script), *COMMAND, "--jobs", "2"], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        for line in process.stdout:
            if line.startswith("[ 1/64]"):
                break
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes
        out, err = process.communicate()  # until the last worker has closed its copies too
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 130
    assert (
        err == "interrupted: the variants compiled so far are on disk; the same command compiles the rest\n"
    )
    assert "64/64" not in out and 1 <= len(objects(cache_dir)) < 64


def test_an_untrusted_folder_is_an_error(demo, cache_dir, capsys):
    demo()
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    assert main([*COMMAND, "--jobs", "1"]) == 1
    assert (
        f"nothing was compiled: The folder that KDA_CACHE_DIR names is not used: {cache_dir}"
        in capsys.readouterr().err
    )
    assert not list(cache_dir.iterdir())


def test_a_backend_that_is_not_installed_is_an_error(capsys):
    assert main(["precompile", "--arch", ARCH, "--backend", "absent"]) == 1
    assert "backend 'absent' is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["9.0", "sm_90", "sm_90a"])
def test_every_form_of_an_architecture_is_read(demo, capsys, arch):
    demo()
    assert main(["precompile", "--arch", arch, "--backend", "demo", "--list"]) == 0
    assert capsys.readouterr().out.startswith("kernels for sm_90a, in ")


def usage_error(capsys, *options):
    with pytest.raises(SystemExit) as stopped:
        main(["precompile", *options])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("arch", ["cpu", "ninety", "9", "sm_90b", "90"])
def test_a_text_that_names_no_architecture_is_a_usage_error(capsys, arch):
    said = usage_error(capsys, "--arch", arch)
    assert said.endswith(
        f"argument --arch: expected a compute capability such as 9.0, sm_90 or sm_90a, got {arch}\n"
    )


@pytest.mark.parametrize("arch", ["7.5", "sm_75", "sm_200a"])
def test_an_architecture_of_no_installed_backend_is_an_error_that_lists_theirs(demo, capsys, arch):
    demo()
    said = usage_error(capsys, "--arch", arch)
    assert "expected an architecture of an installed backend: " in said and "sm_90a (demo" in said
    assert said.rstrip().endswith("got sm_200a" if arch == "sm_200a" else "got sm_75")


#: A third party's backend for an architecture that no package of this project names.
FOREIGN_SPEC = """
from kda_core import BACKEND_ABI
from kda_core.backend import BackendSpec
SPEC = BackendSpec(
    name="foreign", abi=BACKEND_ABI, archs=frozenset({(12, 0)}), features=frozenset(), target="foreign_kernels:Backend",
    install="pip install foreign", variants="foreign_kernels:variants",
)
"""


def test_a_third_party_backend_for_another_architecture_compiles(
    install, kernels, cache_dir, tmp_path, capsys, python
):
    source = Path(kernels.__file__).read_text()
    (tmp_path / "foreign_kernels.py").write_text(f"{source}\n\ndef variants(arch):\n    return sound()[:1]\n")
    install("foreign", source=FOREIGN_SPEC)
    assert main(["precompile", "--arch", "sm_120a", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\[1/1\] .*compiled +RmsNorm\(dim=64, weighted=True\) for sm_120a", out)
    assert len(objects(cache_dir)) == 1
    code = (
        "import foreign_kernels as kernels\n"
        "from kda_cute import arch_of_capability, cache_info, get_kernel\n"
        "get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=64), arch_of_capability((12, 0)))\n"
        "print(cache_info().loaded, cache_info().compiled)\n"
    )
    assert python(code, KDA_DISABLE_JIT="1").split() == ["1", "0"]


def test_disable_jit_names_the_command_that_compiles_the_variant(
    demo, kernels, cache_dir, monkeypatch, tmp_path
):
    demo()
    monkeypatch.setenv("KDA_DISABLE_JIT", "1")
    with pytest.raises(JitDisabledError) as caught:
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), ARCH)
    command = next(line for line in str(caught.value).splitlines() if "python -m" in line).strip()
    wanted = f"KDA_CACHE_DIR={cache_dir} python -m kda_core precompile --arch {ARCH} --backend demo"
    assert command == wanted

    # As a user would paste it into a shell without this process's variables.
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": ":".join(filter(None, sys.path)),
        "HOME": str(tmp_path),
    }
    pasted = subprocess.run(
        ["sh", "-c", command], env=environment, text=True, capture_output=True, check=False
    )
    assert pasted.returncode == 0, pasted.stdout + pasted.stderr
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(), ARCH)
    assert cache_info().loaded == 1


def test_disable_jit_reports_a_variant_that_no_backend_lists(demo, kernels, monkeypatch):
    demo()
    monkeypatch.setenv("KDA_DISABLE_JIT", "1")
    with pytest.raises(JitDisabledError, match="run the call once without KDA_DISABLE_JIT") as caught:
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=96), ARCH)
    assert f"python -m kda_core precompile --arch {ARCH} --list" in str(caught.value)
    clear_memory()
