"""tools/first_light.py: its steps, what becomes of each, and its report."""

import sys
from pathlib import Path

import pytest
from helpers.emulator import calibrate
from helpers.emulator.cases import CASES
from helpers.emulator.sums import SUMS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def light(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import first_light

    return first_light


def python(light, name, code, limit_s=60):
    return light.Step(name, "A question?", (sys.executable, "-c", code), limit_s)


def test_a_step_passes_fails_times_out_or_lacks_its_program(light, tmp_path):
    chosen = [
        python(light, "good", "print('seen')"),
        python(light, "bad", "raise SystemExit('broken here')"),
        python(light, "slow", "import threading; threading.Event().wait()", limit_s=0),
        light.Step("absent", "A question?", ("no-such-program",), 60),
    ]
    results = [light.run(step, tmp_path) for step in chosen]
    assert [r.outcome for r in results] == [
        "passed",
        "failed",
        "timed out",
        "not run: no-such-program is not on PATH",
    ]
    assert [r.failed for r in results] == [False, True, True, False]
    assert (tmp_path / "good.txt").read_text() == "seen\n"
    text = light.report("sm_100a", results)
    assert "| bad | A question? | failed |" in text and "broken here" in text and "seen" not in text


def test_a_failed_step_stops_no_other_and_sets_the_exit_code(light, tmp_path, monkeypatch, capsys):
    chosen = [python(light, "bad", "raise SystemExit(3)"), python(light, "good", "")]
    monkeypatch.setattr(light, "steps", lambda arch, folder: chosen)
    folder = tmp_path / "found"
    assert light.main(["--arch", "sm_90a", "--folder", str(folder)]) == 1
    assert light.main(["--arch", "sm_90a", "--folder", str(folder), "--only", "good"]) == 0
    assert "| good | A question? | passed |" in (folder / "report.md").read_text()
    assert (tmp_path / "found.zip").exists() and str(tmp_path / "found.zip") in capsys.readouterr().out
    with pytest.raises(SystemExit):
        light.main(["--arch", "sm_90a", "--folder", str(folder), "--only", "other"])
    assert "expected some of bad, good, got other" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a", "sm_103a"))
def test_every_step_names_files_that_exist(light, arch, tmp_path):
    found = light.steps(arch, tmp_path)
    assert len({step.name for step in found}) == len(found)
    for step in found:
        for word in step.command:
            if word.startswith(("benchmarks/", "tests/")):
                assert (ROOT / word).exists(), word


def test_the_report_says_how_products_are_summed(light, tmp_path):
    """The emulator stands in for the GPU. It sums products of mma.sync as an H200 does, and those of tcgen05 exactly."""
    names = [name for name in CASES if name.endswith(SUMS)]
    assert calibrate.record(tmp_path / "units", names, on_gpu=False) == {}
    assert light.main(["--arch", "sm_100a", "--folder", str(tmp_path), "--only", "sums"]) == 0
    text = (tmp_path / "report.md").read_text()
    hopper = "products cut 25 bits below the largest exponent, the sum cut"
    assert f"- mma.m16n8k16.f32.bf16, {SUMS}: {hopper}\n" in text
    assert f"- tcgen05.mma.m128n64.bf16, {SUMS}: exact products, the sum rounded to nearest\n" in text
