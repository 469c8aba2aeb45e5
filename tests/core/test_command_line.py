"""The command line: accepted and refused options, exit statuses."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

from kda_core import cli, demo
from kda_core.cli import main


def out_of(capsys, *argv, status=0):
    """Returns what a command prints. Fails if the exit status is another one."""
    assert main(argv) == status
    return capsys.readouterr().out


def refused(capsys, *argv):
    """Returns the message of a command line that argparse refuses."""
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--T", "-1"], "argument --T: expected a whole number of at least 0, got -1"),
        (["--T=-1"], "argument --T: expected a whole number of at least 0, got -1"),
        (["--T", "1e3"], "argument --T: expected a whole number of at least 0, got 1e3"),
        (["--H", "0"], "argument --H: expected a positive integer, got 0"),
        (["--H", "2", "--HV", "3"], "--HV: expected a multiple of --H 2, got 3"),
        (["--H", "4", "--HV", "2"], "--HV: expected a multiple of --H 4, got 2"),
        (["--B", "2", "--N", "3"], "--B: expected 1 with --N"),
        (["--B", "2", "--lengths", "3,4"], "--B: expected 1 with --lengths"),
        (["--N", "3", "--lengths", "3,4"], "--N: expected the number of --lengths, 2, got 3"),
        (["--T", "9", "--lengths", "3,4"], "--T: expected the sum of --lengths, 7, got 9"),
        (["--lengths", "3,-4"], "argument --lengths: expected a whole number of at least 0, got -4"),
        (["--lengths", ""], "argument --lengths: expected a whole number"),
        (["--arch", "90"], "argument --arch: expected cpu, or a compute capability as 9.0, sm_90 or sm_90a, got 90"),
        (["--arch", "sm_9"], "argument --arch: expected cpu, or a compute capability"),
        (["--context-parallel", "on"], "argument --context-parallel: invalid choice: 'on'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)  # fmt: skip
def test_explain_refuses_invalid_options(capsys, options, said):
    assert said in refused(capsys, "explain", *options)


@pytest.mark.parametrize(
    ("arch", "where"),
    [
        ("cpu", "on cpu"), ("9.0", "on cuda sm_90"), ("sm_90", "on cuda sm_90"), ("sm_90a", "on cuda sm_90"),
        ("sm_103a", "on cuda sm_103"), ("12.0", "on cuda sm_120"), ("sm_75", "on cuda sm_75"),
    ],
)  # fmt: skip
def test_explain_accepts_every_form_of_an_architecture(capsys, arch, where):
    assert where in out_of(capsys, "explain", "--arch", arch, "--backend", "reference")


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ([], "beta_sigmoid, gate_in_kernel, qk_l2norm"),
        (["--no-l2norm", "--no-beta-sigmoid", "--gate", "safe"], "nothing special"),
        (["--no-l2norm", "--no-beta-sigmoid", "--gate", "precomputed"], "unbounded_gate"),
        (["--no-l2norm", "--gate", "softplus"], "beta_sigmoid, gate_in_kernel, unbounded_gate"),
        (["--lengths", "100,0,28", "--gate", "safe", "--no-l2norm"], "beta_sigmoid, varlen"),
        (
            ["--HV", "64", "--gate", "safe", "--initial-state", "--final-state", "--state-v-first", "--pin"],
            "beta_sigmoid, final_state, gva, initial_state, pin, qk_l2norm, state_v_first",
        ),
    ],
)
def test_the_options_of_explain_become_features(capsys, options, needs):
    said = out_of(capsys, "explain", "--arch", "cpu", *options)
    assert f"\nneeds     {needs}\n" in said and "backend   reference (choice: automatic)" in said


def test_explain_describes_a_call_that_the_named_backend_declares(capsys, install):
    install("minimal", features=set(), dtypes={"float16", "float32"}, head_dims={(64, 32), (64, 64)})
    command = ["explain", "--arch", "cpu", "--backend", "minimal"]
    printed = out_of(capsys, *command)
    assert "backend   minimal (choice: backend=)" in printed and "\nneeds     nothing special\n" in printed
    assert " K=64 V=32 " in printed and "float16" in printed
    assert " K=64 V=64 " in out_of(capsys, *command, "--V", "64")
    for option, missing in (
        (["--l2norm"], "qk_l2norm"),
        (["--beta-sigmoid"], "beta_sigmoid"),
        (["--gate", "bounded"], "gate_in_kernel"),
        (["--gate", "precomputed"], "unbounded_gate"),
        (["--dtype", "bf16"], "dtype bfloat16"),
        (["--V", "128"], "K=64"),
    ):
        assert missing in out_of(capsys, *command, *option, status=1)


def test_examples_run_on_the_gpu_unless_the_named_backend_is_for_cpus_only(capsys, install, monkeypatch):
    install("for-cpus")
    install("for-both", archs={"cpu", (9, 0)})
    install("for-another-gpu", archs={(12, 0)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for name, where, status in (
        ("for-cpus", "cpu", 0),
        ("for-both", "cuda sm_90", 0),
        ("for-another-gpu", "cuda sm_90", 1),
        ("reference", "cuda sm_90", 0),
        ("absent", "cuda sm_90", 1),
    ):
        printed = out_of(capsys, "explain", "--backend", name, status=status)
        assert printed.splitlines()[0].endswith(f" on {where}"), name


@pytest.mark.parametrize("tokens", ["0", "1"])
def test_calls_of_few_tokens_are_explained(capsys, tokens):
    assert f" T={tokens} " in out_of(capsys, "explain", "--arch", "cpu", "--T", tokens)


def test_explain_exits_with_1_where_the_call_would_fail(capsys):
    said = out_of(capsys, "explain", "--arch", "cpu", "--backend", "absent", status=1)
    assert "error     BackendNotFoundError: backend 'absent'" in said and "(choice: backend=)" in said


def test_unknown_commands_are_refused(capsys):
    assert "invalid choice: 'explode'" in refused(capsys, "explode")
    assert "COMMAND" in refused(capsys)


def test_an_interrupt_prints_no_traceback(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_closed_pipe_prints_no_traceback():
    end, pipe = os.pipe()
    os.close(end)
    done = subprocess.run(
        [sys.executable, "-m", "kda_core", "backends"],
        stdout=pipe,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(pipe)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_console_script_is_main():
    (script,) = entry_points(group="console_scripts", name="kda-core")
    assert script.load() is cli.main
