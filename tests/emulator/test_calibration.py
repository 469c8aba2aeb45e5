"""The emulator beside what an H200 gave (`calibrate.py`), and the recorder with the emulator in the GPU's place."""

import shutil

import numpy as np
import pytest
from helpers.emulator import calibrate
from helpers.emulator.cases import CASES, TO_BE_RECORDED, Bits

PAGE = calibrate.WRITTEN.read_text().splitlines()


@pytest.mark.parametrize("name", CASES)
def test_the_emulator_gives_what_a_gpu_gave(name):
    """And the page says so."""
    case = CASES[name]
    try:
        want = calibrate.fixture(case)
    except calibrate.MissingFixture as error:
        if name in TO_BE_RECORDED:
            assert calibrate.row(case, calibrate.Finding("to be recorded", True)) in PAGE
            pytest.skip("to be recorded on an H200: cases.TO_BE_RECORDED")
        pytest.fail(str(error), pytrace=False)
    assert name not in TO_BE_RECORDED, "it has been recorded: take it off the list"
    finding = calibrate.compare(case, calibrate.outputs(case), want)
    assert finding.good, f"{finding.what}; allowed: {case.limit}"
    if isinstance(case.limit, Bits):
        assert calibrate.row(case, finding) in PAGE
    else:  # its figures are those of the machine that made the page
        (row,) = (line for line in PAGE if line.startswith(f"| {case.name} | {case.group} |"))
        assert row.endswith(f" | {case.limit} |") and "not allowed" not in row


def test_the_page_is_of_these_cases_and_fixtures():
    rows = [line for line in PAGE if line.startswith("| ")][2:]
    assert len(rows) == len(CASES)
    assert calibrate.machines() in "\n".join(PAGE)


SOME = [
    "arithmetic/add.s32", "arithmetic/ex2.approx.ftz.f32", "memory/ldmatrix.x4 stmatrix.x4", "matrices/mma.m16n8k16.f32.bf16",
    "matrices/product of 50 rows by tensor maps", "memory/box with swizzle 3", "memory/atom.shared.add.f32",
]  # fmt: skip


def test_what_the_recorder_writes_is_what_is_compared(tmp_path):
    assert calibrate.record(tmp_path, SOME, on_gpu=False, jobs=2) == {}
    table, good = calibrate.report(SOME, tmp_path)
    assert good and table.count("| equal |") >= len(SOME)
    assert "none, emulated" in calibrate.machines(tmp_path)


def test_a_case_that_fails_is_listed_and_takes_no_other_with_it(tmp_path, monkeypatch):
    names = [SOME[0], "arithmetic/no such case", SOME[2]]
    monkeypatch.setitem(calibrate.CASES, names[1], calibrate.Case("arithmetic", "no such case", dict))
    errors = calibrate.record(tmp_path, names, on_gpu=False)
    assert list(errors) == [names[1]] and "KeyError" in errors[names[1]]  # the worker does not know it
    assert names[1] in (tmp_path / "errors.txt").read_text()
    assert calibrate.report([names[0], names[2]], tmp_path)[1]
    with pytest.raises(calibrate.MissingFixture, match="no fixture of arithmetic/no such case"):
        calibrate.fixture(calibrate.CASES[names[1]], tmp_path)


def test_what_is_recorded_again_leaves_the_rest(tmp_path, capsys):
    calibrate.record(tmp_path, SOME[:2], on_gpu=False)
    path = tmp_path / "arithmetic.npz"
    with np.load(path) as archive:
        before = {name: archive[name] for name in archive.files}
    fake = {f"add.s32|{name}": np.zeros(1, np.int32) for name in ("d", "inputs")}
    calibrate.merge(path, fake, {"gpu": "another"})
    with np.load(path) as archive:
        after = {name: archive[name] for name in archive.files}
    assert before.keys() == after.keys() and not after["add.s32|d"].any()
    assert all(
        x.tobytes() == before[n].tobytes() for n, x in after.items() if not n.startswith(("add.s32", "about"))
    )
    assert "- 1 of arithmetic: gpu another" in calibrate.machines(tmp_path)
    # Again what was there before: the other machine is gone.
    calibrate.record(tmp_path, SOME[:1], on_gpu=False)
    assert "another" not in calibrate.machines(tmp_path)
    assert path.read_bytes() == (calibrate.record(tmp_path, SOME[:2], on_gpu=False) or path.read_bytes())
    # Only what is missing.
    names = ["arithmetic/add.s32", "arithmetic/sub.s32"]
    options = ["--missing", "--emulate", "--jobs", "1", "--fixtures", str(tmp_path)]
    assert calibrate.main(["record", *options, *names]) == 0
    assert "1 of 1 cases recorded" in capsys.readouterr().out


def test_a_difference_is_told(tmp_path):
    name = SOME[0]
    calibrate.record(tmp_path, [name], on_gpu=False)
    case = CASES[name]
    found, want = calibrate.outputs(case), calibrate.fixture(case, tmp_path)
    assert calibrate.compare(case, found, want) == calibrate.Finding("equal", True)
    found["d"] = found["d"] ^ 1
    assert calibrate.compare(case, found, want) == calibrate.Finding(
        f"{len(found['d'])} of {len(found['d'])} differ", False
    )
    shutil.rmtree(tmp_path)
    assert calibrate.report([name], tmp_path) == (calibrate.report([name], tmp_path)[0], False)
