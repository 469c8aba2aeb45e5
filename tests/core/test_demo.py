"""The main job on the command line: what it prints, and when."""

import pytest
import torch

from kda_core import demo
from kda_core.cli import main
from kda_core.errors import DeviceError


def test_the_demo_says_what_it_does_before_it_does_it(monkeypatch):
    told, told_before_the_oracle = [], []
    oracle = demo.token_oracle

    def watched(**x):
        told_before_the_oracle.extend(told)
        return oracle(**x)

    monkeypatch.setattr(demo, "token_oracle", watched)
    report = demo.run("cpu", tokens=100, say=told.append)
    assert report.ok and str(report) == "\n".join(told)
    steps = [line.split()[1] for line in told if line.startswith("  step ")]
    assert steps == ["1/4", "2/4", "3/4", "4/4"]
    assert "fp64 token loop over 100 tokens" in told_before_the_oracle[-1]
    assert not any("one piece  " in line for line in told_before_the_oracle), (
        "results come when they are known"
    )


def test_the_command_prints_every_line_of_the_report(capsys):
    assert main(["demo", "--device", "cpu", "--tokens", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "KDA prefill of a real text" and lines[-1] == "  result     exact within tolerance"
    assert any("two pieces 20 + 20 tokens" in line for line in lines)


def test_one_token_is_a_text_too(capsys):
    assert main(["demo", "--device", "cpu", "--tokens", "1"]) == 0
    assert "two pieces 0 + 1 tokens" in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_one_line_and_wrong_usage(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "DeviceError: device: expected cpu (torch finds no CUDA GPU here), got cuda\n"
    with pytest.raises(DeviceError, match="torch finds no CUDA GPU here"):
        demo.run("cuda")
