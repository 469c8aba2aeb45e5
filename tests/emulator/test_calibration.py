"""The emulator against recorded outputs of an H200 (`calibrate.py`), and the recorder with the emulator in place of the GPU."""

import shutil
import subprocess

import numpy as np
import pytest
from helpers.emulator import calibrate, ptx
from helpers.emulator.cases import CASES, TO_BE_RECORDED, Bits
from helpers.nightly import nightly

from kda_cute.jit.ptxas import ptxas_path

PAGE = calibrate.WRITTEN.read_text().splitlines()
#: The launches of kda-sm90 that every change runs; the nightly session runs all. `test_prefill` compares others with fp64.
LAUNCHES = {
    "prefill/prefill chunk 64, 1 warpgroup, bounded, steep, vote", "prefill/prefill chunk 32, 2 warpgroups, precomputed, masked",
    "prefill/prefill chunk 32, 2 warpgroups, softplus", "prefill/prefill chunk 32, 2 warpgroups, bounded, GVA, initial state",
    "prefill/prefill chunk 64, 2 warpgroups, packed, V-first states", "prefill/merge of segments",
}  # fmt: skip
assert CASES.keys() >= LAUNCHES


@pytest.mark.parametrize(
    "name", [nightly(x) if x.startswith("prefill/") and x not in LAUNCHES else x for x in CASES]
)
def test_the_emulator_matches_recorded_gpu_outputs(name):
    """The page in docs has the same row."""
    case = CASES[name]
    try:
        want = calibrate.fixture(case)
    except calibrate.MissingFixture as error:
        if name in TO_BE_RECORDED:
            assert calibrate.row(case, calibrate.Finding("to be recorded", True)) in PAGE
            pytest.skip("to be recorded on a GPU: cases.TO_BE_RECORDED")
        pytest.fail(str(error), pytrace=False)
    assert name not in TO_BE_RECORDED, "it has been recorded: take it off TO_BE_RECORDED"
    finding = calibrate.compare(case, calibrate.outputs(case), want)
    assert finding.good, f"{finding.text}; allowed: {case.limit}"
    if isinstance(case.limit, Bits):
        assert calibrate.row(case, finding) in PAGE
    else:  # the figures of the row are those of the machine that wrote the page
        (row,) = (line for line in PAGE if line.startswith(f"| {case.name} | {case.group} |"))
        assert row.endswith(f" | {case.limit} |") and "not allowed" not in row


def test_ptxas_accepts_the_cases_that_no_gpu_has_executed(tmp_path, monkeypatch):
    """The first Blackwell GPU must not be the first to read them."""
    texts: dict[str, str] = {}
    monkeypatch.setattr(ptx, "target", "sm_100a")
    monkeypatch.setattr(ptx, "execute", lambda text, *arguments, **options: texts.setdefault(text, name))
    for name in (name for name in TO_BE_RECORDED if CASES[name].group == "blackwell"):
        CASES[name].run()
    assert len(texts) > 20
    modules: dict[str, str] = {}  # by their first lines: ptxas takes longer to start than to assemble a case
    for number, (text, name) in enumerate(texts.items()):
        start, entry, rest = text.partition(".visible .entry test(")
        assert entry, name
        modules[start] = modules.get(start, start) + f"// {name}\n.visible .entry test{number}({rest}"
    for number, text in enumerate(modules.values()):
        path = tmp_path / f"{number}.ptx"
        path.write_text(text)
        command = [str(ptxas_path()), "-arch", "sm_100a", str(path), "-o", str(tmp_path / "code")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{text}"


def test_the_page_lists_all_cases_and_recordings():
    rows = PAGE[PAGE.index("## Cases") + 4 :]
    assert len(rows) == len(CASES)
    assert calibrate.machines() in "\n".join(PAGE)


SOME = [
    "arithmetic/add.s32", "arithmetic/ex2.approx.ftz.f32", "memory/ldmatrix.x4 stmatrix.x4", "matrices/mma.m16n8k16.f32.bf16",
    "matrices/product of 50 rows by tensor maps", "memory/box with swizzle 3", "memory/atom.shared.add.f32",
]  # fmt: skip


def test_recorded_outputs_compare_as_equal(tmp_path):
    assert calibrate.record(tmp_path, SOME, on_gpu=False, jobs=2) == {}
    table, good = calibrate.report(SOME, tmp_path)
    assert good and table.count("| equal |") >= len(SOME)
    assert "none, emulated" in calibrate.machines(tmp_path)


def test_a_failing_case_is_listed_and_does_not_affect_others(tmp_path, monkeypatch):
    names = [SOME[0], "arithmetic/no such case", SOME[2]]
    monkeypatch.setitem(calibrate.CASES, names[1], calibrate.Case("arithmetic", "no such case", dict))
    errors = calibrate.record(tmp_path, names, on_gpu=False)
    assert (
        list(errors) == [names[1]] and "KeyError" in errors[names[1]]
    )  # the worker process lacks the added case
    assert names[1] in (tmp_path / "errors.txt").read_text()
    assert calibrate.report([names[0], names[2]], tmp_path)[1]
    with pytest.raises(calibrate.MissingFixture, match="no fixture of arithmetic/no such case"):
        calibrate.fixture(calibrate.CASES[names[1]], tmp_path)


def test_recording_a_case_again_keeps_the_others(tmp_path, capsys):
    calibrate.record(tmp_path, SOME[:2], on_gpu=False)
    path = tmp_path / "arithmetic.npz"
    with np.load(path) as archive:
        before = {name: archive[name] for name in archive.files}
    fake = {f"add.s32|{name}": np.zeros(1, np.int32) for name in ("d", "inputs")}
    calibrate.update(path, fake, {"gpu": "another"})
    with np.load(path) as archive:
        after = {name: archive[name] for name in archive.files}
    assert before.keys() == after.keys() and not after["add.s32|d"].any()
    assert all(
        x.tobytes() == before[n].tobytes() for n, x in after.items() if not n.startswith(("add.s32", "about"))
    )
    assert "- 1 of arithmetic: gpu another" in calibrate.machines(tmp_path)
    # The case is recorded as before: the other machine is no longer listed.
    calibrate.record(tmp_path, SOME[:1], on_gpu=False)
    assert "another" not in calibrate.machines(tmp_path)
    assert path.read_bytes() == (calibrate.record(tmp_path, SOME[:2], on_gpu=False) or path.read_bytes())
    # Cases whose names are equal up to a "|" are different cases.
    for case in ("shfl %r20|, 31", "shfl %r20|, 7"):
        calibrate.update(tmp_path / "memory.npz", {f"{case}|d": np.zeros(1)}, {"gpu": "one"})
    assert "- 2 of memory: gpu one" in calibrate.machines(tmp_path)
    with np.load(tmp_path / "memory.npz") as archive:
        assert {"shfl %r20|, 31|d", "shfl %r20|, 7|d"} < set(archive.files)
    # --missing records only the case that has no fixture.
    names = ["arithmetic/add.s32", "arithmetic/sub.s32"]
    options = ["--missing", "--emulate", "--jobs", "1", "--fixtures", str(tmp_path)]
    assert calibrate.main(["record", *options, *names]) == 0
    assert "1 of 1 cases recorded" in capsys.readouterr().out


def test_a_difference_is_reported(tmp_path):
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
