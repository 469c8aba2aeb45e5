"""The demo: what it prints, and when."""

import pytest
import torch

from kda_core import demo
from kda_core.cli import main
from kda_core.errors import DeviceError
from kda_core.registry import record_calls


def test_the_demo_prints_each_step_before_it_runs(monkeypatch):
    printed, printed_before_the_oracle = [], []
    oracle = demo.token_oracle

    def watched(**x):
        printed_before_the_oracle.extend(printed)
        return oracle(**x)

    monkeypatch.setattr(demo, "token_oracle", watched)
    report = demo.run("cpu", tokens=100, say=printed.append)
    assert report.ok and str(report) == "\n".join(printed)
    steps = [line.split()[1] for line in printed if line.startswith("  step ")]
    assert steps == ["1/4", "2/4", "3/4", "4/4"]
    assert "fp64 token loop over 100 tokens" in printed_before_the_oracle[-1]
    assert not any("one piece  " in line for line in printed_before_the_oracle), (
        "results are printed after they are known"
    )


def test_the_command_prints_every_line_of_the_report(capsys):
    assert main(["demo", "--device", "cpu", "--tokens", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "KDA prefill of a real text" and lines[-1] == "  result     exact within tolerance"
    assert any("two pieces 20 + 20 tokens" in line for line in lines)


def test_the_demo_accepts_one_token(capsys):
    assert main(["demo", "--device", "cpu", "--tokens", "1"]) == 0
    assert "two pieces 0 + 1 tokens" in capsys.readouterr().out


def test_a_missing_gpu_is_one_line_and_exit_status_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "DeviceError: device: expected cpu (torch finds no CUDA GPU here), got cuda\n"
    with pytest.raises(DeviceError, match="torch finds no CUDA GPU here"):
        demo.run("cuda")


@pytest.mark.parametrize(
    ("features", "dtypes"),
    [
        (set(), {"float32"}),
        ({"initial_state", "final_state"}, None),
        ({"gate_in_kernel", "qk_l2norm"}, {"bfloat16"}),
        ({"unbounded_gate", "beta_sigmoid"}, {"bfloat16", "float16"}),
    ],
    ids=["none", "states", "bounded gate", "unbounded decay"],
)
def test_a_named_backend_gets_a_layer_that_it_serves(install, features, dtypes):
    install("small", features=features, **({} if dtypes is None else {"dtypes": dtypes}))
    with record_calls() as calls:
        report = demo.run("cpu", tokens=60, backend="small")
    assert report.ok and {c.backend for c in calls} == {"small"}
    assert ("two pieces" in str(report)) == ("final_state" in features)
