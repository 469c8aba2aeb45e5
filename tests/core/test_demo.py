"""The demo: its lines, and the order in which they appear."""

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
    assert not any("one call   " in line for line in printed_before_the_oracle), (
        "results are printed after they are known"
    )


def test_the_command_prints_every_line_of_the_report(capsys):
    assert main(["demo", "--device", "cpu", "--tokens", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "KDA prefill of a real text"
        and lines[-1] == "  result     all errors are within tolerance"
    )
    assert any("two calls  20 + 20 tokens" in line for line in lines)


def test_the_demo_accepts_one_token(capsys):
    assert main(["demo", "--device", "cpu", "--tokens", "1"]) == 0
    assert "two calls  0 + 1 tokens" in capsys.readouterr().out


def test_a_missing_gpu_is_one_line_and_exit_status_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "DeviceError: device: expected cpu (torch finds no CUDA GPU here), got cuda\n"
    with pytest.raises(DeviceError, match="torch finds no CUDA GPU here"):
        demo.run("cuda")


@pytest.mark.parametrize(
    ("features", "declared"),
    [
        (set(), {"dtypes": {"float32"}}),
        ({"initial_state", "final_state"}, {"head_dims": {(64, 32), (96, 96)}}),
        ({"gate_in_kernel", "qk_l2norm"}, {"dtypes": {"bfloat16"}, "head_dims": {(16, 48)}}),
        ({"unbounded_gate", "beta_sigmoid"}, {"dtypes": {"bfloat16", "float16"}, "head_dims": {(64, 64), (128, 128)}}),
    ],
    ids=["none", "states", "bounded gate", "unbounded decay"],
)  # fmt: skip
def test_a_named_backend_gets_a_layer_that_it_serves(install, features, declared):
    install("small", features=features, **declared)
    with record_calls() as calls:
        report = demo.run("cpu", tokens=60, backend="small")
    assert report.ok and {c.backend for c in calls} == {"small"}
    assert ("two calls" in str(report)) == ("final_state" in features)
