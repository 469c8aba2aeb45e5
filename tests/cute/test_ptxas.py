"""The ptxas report, with real spills and complaints of kernels and of PTX that provokes them."""

from __future__ import annotations

import subprocess
from importlib import metadata

import pytest

from kda_core.errors import CompileError
from kda_cute.jit import ptxas

VERBOSE = [
    "ptxas info    : 0 bytes gmem",
    "ptxas info    : Compiling entry function 'k' for 'sm_90a'",
    "ptxas info    : Function properties for k",
    "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
    "ptxas info    : Used 30 registers, used 1 barriers, 1024 bytes smem",
]
ACCUMULATORS = ", ".join(f"%f{i}" for i in range(4))


@pytest.fixture(scope="module")
def assembler():
    try:
        return ptxas.ptxas_path()
    except CompileError as error:
        pytest.skip(f"needs ptxas, no report could be made: {error}")


def wgmma_ptx(*, touch: bool = False, directives: str = "", version: str = "8.0") -> str:
    """Two wgmmas on one accumulator. With ``touch``, the code changes it while the first one is in flight."""
    mma = (
        f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{ACCUMULATORS}}}, %rd1, %rd2, 1, 1, 1, 0, 0;"
    )
    return "\n".join(
        [
            f".version {version}",
            ".target sm_90a",
            ".address_size 64",
            f".visible .entry two_wgmmas(.param .u64 out, .param .u64 a, .param .u64 b) {directives}",
            "{",
            ".reg .f32 %f<4>;",
            ".reg .b64 %rd<4>;",
            *(f"ld.param.u64 %rd{i}, [{name}];" for i, name in enumerate(("out", "a", "b"))),
            "cvta.to.global.u64 %rd3, %rd0;",
            *(f"mov.f32 %f{i}, 0f00000000;" for i in range(4)),
            "wgmma.fence.sync.aligned;",
            mma,
            "add.f32 %f0, %f0, %f1;" if touch else "",
            mma,
            "wgmma.commit_group.sync.aligned;",
            "wgmma.wait_group.sync.aligned 0;",
            *(f"st.global.f32 [%rd3+{4 * i}], %f{i};" for i in range(4)),
            "ret;",
            "}",
        ]
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_sound_kernel_has_no_problems(kernels, assembler, arch):
    report = ptxas.report(kernels.RmsNorm, kernels.RmsConfig(), arch)
    assert report.problems() == ()
    (use,) = report.usage
    assert 0 < use.registers < 64
    assert (use.smem, use.stack, use.spill_stores, use.spill_loads) == (0, 0, 0, 0)
    assert use.name.endswith("RmsNorm")


def test_a_spilling_kernel_is_found(kernels, assembler):
    report = ptxas.report(kernels.Spill, kernels.SpillConfig(), "sm_90a")
    (use,) = report.usage
    assert use.spill_stores > 0
    assert use.spill_loads > 0
    assert use.stack > 0
    (problem,) = report.problems()
    assert f"spills {use.spill_stores} bytes" in problem


def test_fewer_values_do_not_spill(kernels, assembler):
    assert ptxas.report(kernels.Spill, kernels.SpillConfig(values=32), "sm_90a").problems() == ()


def test_wgmma_without_a_hazard_has_no_problems(assembler):
    assert ptxas.assemble("two wgmmas", wgmma_ptx(), "sm_90a").problems() == ()


def test_an_injected_wait_is_a_problem(assembler):
    (problem,) = ptxas.assemble("two wgmmas", wgmma_ptx(touch=True), "sm_90a").problems()
    assert "(C7517)" in problem
    assert "two_wgmmas" in problem


def test_an_ignored_directive_is_a_problem(assembler):
    ptx = wgmma_ptx(directives=".maxntid 1024, 1, 1 .minnctapersm 40")
    (problem,) = ptxas.assemble("two wgmmas", ptx, "sm_90a").problems()
    assert "minnctapersm will be ignored" in problem


def test_options_reach_ptxas(assembler):
    ptx = wgmma_ptx(directives=".maxntid 1024, 1, 1 .minnctapersm 40")
    assert ptxas.assemble("two wgmmas", ptx, "sm_90a", ["--disable-warnings"]).problems() == ()


def test_options_of_the_kernel_reach_ptxas(kernels, assembler, monkeypatch):
    monkeypatch.setattr(
        kernels.Spill, "compile_options", "--ptxas-options '--warn-on-spills -O2'", raising=False
    )
    report = ptxas.report(kernels.Spill, kernels.SpillConfig(), "sm_90a")
    assert any("warning : Registers are spilled" in problem for problem in report.problems())


def test_spills_are_accepted_up_to_what_the_kernel_allows(kernels, assembler, monkeypatch):
    spilled = ptxas.report(kernels.Spill, kernels.SpillConfig(), "sm_90a").usage[0]
    most = max(spilled.spill_stores, spilled.spill_loads)
    for allowance, problems in ((most, 0), (most - 1, 1)):
        monkeypatch.setattr(kernels.Spill, "spill_allowance", allowance, raising=False)
        found = ptxas.report(kernels.Spill, kernels.SpillConfig(), "sm_90a").problems()
        assert len(found) == problems, found
    assert f"allowed {most - 1}" in found[0]


def test_ptx_that_is_newer_than_ptxas(assembler):
    with pytest.raises(
        CompileError, match=r"Unsupported \.version 99\.0(.|\n)*pip install -U nvidia-cuda-nvcc"
    ):
        ptxas.assemble("two wgmmas", wgmma_ptx(version="99.0"), "sm_90a")


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized ...",
        "ptxas info    : (C7512) Potential Performance Loss: ...",
        "ptxas info    : (C7518) Potential Performance Loss: ...",
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain ...",
        "ptxas warning : something",
        "ptxas /tmp/kernel.ptx, line 3; warning : something",
    ],
)
def test_complaints_are_problems(line):
    clean = "\n".join(VERBOSE)
    assert ptxas.parse("k", clean).problems() == ()
    assert ptxas.parse("k", clean).usage == (ptxas.Usage("k", registers=30, smem=1024),)
    assert len(ptxas.parse("k", f"{line}\n{clean}").problems()) == 1
    assert len(ptxas.parse("k", clean.replace("    0 bytes stack", "    8 bytes stack")).problems()) == 1


@pytest.mark.parametrize("kept", [0, 2, 3, 4])
def test_output_that_cannot_be_parsed_is_an_error(kept):
    with pytest.raises(CompileError, match="the output of ptxas cannot be parsed"):
        ptxas.parse("k", "\n".join(VERBOSE[:kept]))


def test_a_missing_wheel_is_named(monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", none)
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvcc"):
        ptxas.ptxas_path()


def test_command_line(kernels, assembler, capsys):
    assert ptxas.main(["helpers.demo_kernels:sound", "--arch", "sm_90a", "--arch", "sm_100a"]) == 0
    output = capsys.readouterr().out
    assert "RmsNorm(dim=64, weighted=False) for sm_100a" in output
    assert "8 kernels, 0 problems, 0 not compiled" in output


def test_command_line_fails_on_a_spill(kernels, assembler, start_python):
    """Runs the command in a process, to get its real exit status."""
    arguments = ["kda_cute.jit.ptxas", "helpers.demo_kernels:spilling", "--arch", "sm_90a"]
    run = f"runpy.run_module({arguments[0]!r}, run_name='__main__', alter_sys=True)"
    process = start_python(f"import runpy, sys; sys.argv[1:] = {arguments[1:]!r}; {run}")
    output, errors = process.communicate()
    assert process.returncode == 1, errors
    assert "problem: kernel_cutlass_kernel_helpersdemo_kernelsSpill: spills" in output
    assert "2 kernels, 1 problems" in output


def test_command_line_fails_on_a_kernel_that_does_not_compile(kernels, assembler, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "spilling", lambda: [(kernels.Broken, kernels.SpillConfig())])
    assert ptxas.main(["helpers.demo_kernels:spilling", "--arch", "sm_90a"]) == 1
    assert "no_such_name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["helpers.demo_kernels", "helpers.demo_kernels:absent", "absent_module:KERNELS", ":x"]
)
def test_command_line_usage(kernels, name, capsys):
    with pytest.raises(SystemExit) as caught:
        ptxas.main([name, "--arch", "sm_90a"])
    assert caught.value.code == 2
    assert "KERNELS" in capsys.readouterr().err


def test_ptxas_runs(assembler):
    assert (
        "release"
        in subprocess.run([assembler, "--version"], check=True, capture_output=True, text=True).stdout
    )
