"""The benchmark of serving: rows are measured on any machine, the floor's kernel touches its slots only, the page compares rows."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from benchmarks import decode, mixed, report, report_decode

from kda_core import fused_recurrent_kda
from kda_core.bench import decode as pools
from kda_core.bench import measure, peers, plots

CPU = torch.device("cpu")
RESULTS = sorted((Path(report.__file__).parent / "results").glob("*/decode.json"))
RECORD = {"id": "r", "device": "h200", "device_name": "a GPU", "command": "benchmarks/decode.py", "torch": "2",
          "versions": {"kda-sm90": "0.1", "fla-core": "0.6"}}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measure_rows(path, *arguments):
    """Returns the results of a run with one repetition."""
    assert decode.main([*arguments, "--repeats", "1", "--out", str(path)]) == 0
    return json.loads(path.read_text())


# ---- rows


def test_rows_of_all_calls_are_measured_and_other_rows_stay(tmp_path):
    path = tmp_path / "decode.json"
    other = dict(zip(decode.KEY, ("decode", 1, 12, 1, "kda-sm90", "float32"), strict=True)) | {
        "run": "before"
    }
    path.write_text(json.dumps({"runs": [{"id": "before"}], "rows": [other]}))
    kept, *rows = measure_rows(path, "--impl", "reference", "rmw")["rows"]
    assert kept == other and len({tuple(r[n] for n in decode.KEY) for r in rows}) == len(rows)
    decoded = {(r["T"], r["impl"], r["state_dtype"]) for r in rows if (r["call"], r["N"]) == ("decode", 2)}
    both = ("float32", "bfloat16")
    assert decoded == {(T, "reference", d) for T in (1, 4) for d in both} | {(1, "rmw", d) for d in both}
    others = [r["call"] for r in rows if (r["call"], r["N"]) != ("decode", 2)]
    assert others == [
        "prefill",
        "prefill without a pool",
        "decode",
        "mixed, prefill first",
        "mixed, decode first",
    ]
    for row in rows:
        assert row["us"] > 0 and row["timing"] == "eager" and row["launches"] >= 2
        assert not report_decode.is_wrong(row), row
        assert (row["error_o"] is None) == (row["impl"] == "rmw")


def test_rows_with_records_are_measured_where_the_backend_has_them(tmp_path):
    assert pools.has_journal("reference") and not pools.has_journal("unknown")
    rows = measure_rows(tmp_path / "decode.json", "--call", "decode")["rows"]
    found = {(r["T"], r["impl"]) for r in rows}
    assert found >= {(T, "reference+journal") for T in (1, 4)}
    assert found >= {(4, "reference+verify"), (4, "reference+commit")}
    assert not any(report_decode.is_wrong(r) for r in rows)


def test_a_backend_without_records_is_named(monkeypatch, capsys):
    monkeypatch.setattr(pools, "has_journal", lambda backend: False)
    assert decode.default(CPU) == ["reference", "rmw"]
    assert "reference: no rows +verify, +commit, +journal, because" in capsys.readouterr().out


def test_each_launch_has_slots_of_its_own_and_the_pool_is_large_enough():
    problem = pools.make_problem(3, 2, 4, 4, "bfloat16", CPU, 3 << 20)
    assert problem.pool.dtype == torch.bfloat16 and problem.pool.nbytes >= 3 << 20
    assert problem.slots.shape[1:] == (3, 4)
    assert problem.slots.flatten().sort().values.tolist() == list(range(len(problem.pool)))
    assert problem.tokens["q"].shape == (3, 4, 2, 128)
    assert pools.make_problem(1, 1, 1, 1, "float32", CPU, 0).slots.shape == (2, 1, 1)


@pytest.mark.parametrize("T", [1, 4])
def test_fla_gets_the_slots_in_rows_of_one_stride_and_updates_the_same_states(T, monkeypatch):
    given = []

    def fwd(inplace_final_state, **x):
        given.append(x["ssm_state_indices"])
        fused_recurrent_kda(
            **x, inplace_final_state=inplace_final_state, output_final_state=True, backend="reference"
        )

    names = ("fla", "fla.ops", "fla.ops.kda", "fla.ops.kda.fused_recurrent")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].fused_recurrent_kda_fwd = fwd
    problem = pools.make_problem(3, 1, T, T, "float32", CPU, 0)
    found = pools.launch("fla", problem).check()
    assert found["error_o"] < 3e-3 and found["error_state"] < 1e-5
    assert given[0].stride(0) == 8 and given[0].shape == ((3,) if T == 1 else (3, 4))
    assert given[0].view(3, -1).equal(problem.slots[0])


def test_only_calls_that_exist_have_rows():
    def served(impl, dtype="float32"):
        return [T for T in decode.T if decode.serves(impl, T, dtype)]

    assert served("rmw") == [1]
    assert served("kda-sm90+verify") == served("kda-sm90+commit") == [4, 8]
    assert served("fla") == served("flashinfer", "bfloat16") == served("kda-sm90+journal") == [1, 4, 8]
    assert served("flashinfer") == []
    assert pools.slots_of("kda-sm90", 8) == 8 and pools.slots_of("kda-sm90+verify", 8) == 1


def test_the_fastest_variant_counts(monkeypatch):
    launch = lambda name: pools.Launch([lambda: None], lambda: {"error_o": None, "error_state": float(name)})
    seen = iter((3.0, 2.0, 5.0))
    monkeypatch.setattr(measure, "eager_launch_time", lambda calls, repeats: next(seen))
    row = decode.times([launch(name) for name in range(3)], CPU, 1)
    assert (row["us"], row["variant"], row["error_state"]) == (2000.0, 1, 1.0)


def test_both_parts_of_a_mixed_call_are_checked(monkeypatch):
    for missing in (0, 1):
        monkeypatch.setattr(mixed, "_fork", lambda device, at=missing: lambda *parts: parts[at]())
        *_, (row, launch) = mixed.launches("reference", mixed.SMALL, CPU)
        assert row["call"] == "mixed, decode first" and launch.check()["error_state"] > 1e-2


@pytest.mark.parametrize("loads", [4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernel_of_the_floor_multiplies_its_slots_only(dtype, loads):
    emulator = pytest.importorskip("ptx_emulator", reason="the kernel runs on the emulator")
    pytest.importorskip("cutlass", reason="the kernel needs the CuTe DSL")
    from benchmarks.rmw import Arguments, RmwConfig, RmwKernel

    from kda_cute import arguments, get_kernel, kernels_made_by
    from kda_cute.testing.emulation import load

    pool = torch.randn(5, 2, 128, 128).to(pools.STATE_DTYPES[dtype])
    want, slots = pool.clone(), torch.tensor([3, 0], dtype=torch.int32)
    want[slots.long()] *= -1
    leading = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16)
    with kernels_made_by(load), emulator.device("sm_90a", tensors=[leading, pool, slots]):
        values = arguments.pack(Arguments, states=pool, slots=slots, bytes=pool[0].nbytes, N=2, factor=-1.0)
        get_kernel(RmwKernel, RmwConfig(loads, dtype), "sm_90a")(leading, *values)
    assert pool.equal(want)


# ---- page


def row(impl, us, dtype="float32", error=1e-6, call="decode", N=64, HV=32, T=1):
    """Returns a row that is made up."""
    return {"call": call, "N": N, "HV": HV, "T": T, "impl": impl, "state_dtype": dtype, "us": us, "timing": "graph", "launches": 2,
            "variant": None, "error_o": None if impl == "rmw" else 2e-3, "error_state": 0.0 if impl == "rmw" else error,
            "first_call_s": 1.0, "run": "r"}  # fmt: skip


def data():
    """Returns results that are made up."""
    return {"runs": [RECORD], "rows": [
        row("kda-sm90", 80.0), row("rmw", 64.0), row("fla", 160.0), row("kda-sm90", 40.0, "bfloat16", 2e-3), row("kda-sm90+journal", 48.0),
        row("kda-sm90", 10.0, N=1), row("rmw", 5.0, N=1), row("fla", 8.0, N=1, error=1.0),
        row("kda-sm90", 500.0, T=8), row("kda-sm90+verify", 100.0, T=8), row("kda-sm90", 75.0, N=60),
        row("kda-sm90", 525.0, call="prefill", N=4, T=2048), row("kda-sm90", 500.0, call="prefill without a pool", N=4, T=2048),
        row("kda-sm90", 540.0, call="mixed, prefill first", T=2048), row("kda-sm90", 570.0, call="mixed, decode first", T=2048),
    ]}  # fmt: skip


def test_page_compares_rows_of_one_shape_with_the_floor_and_fla():
    lines = report_decode.page(data(), "h200").splitlines()
    assert "| 64 | 32 | 1 | fp32 | kda-sm90 | 80.0 | 1.25 | 0.50 |  | 2.00e-03 | 1.00e-06 | 1 |" in lines
    assert "| 64 | 32 | 1 | bf16 | kda-sm90 | 40.0 |  |  | 0.50 | 2.00e-03 | 2.00e-03 | 1 |" in lines
    assert (
        "| 64 | 32 | 1 | fp32 | kda-sm90+journal | 48.0 | 0.75 | 0.30 |  | 2.00e-03 | 1.00e-06 | 1 |" in lines
    )
    assert "| 1 | 32 | 1 | fp32 | fla | 8.0 | wrong |  |  | 2.00e-03 | 1.00e+00 | 1 |" in lines
    assert "| 1 | 32 | 1 | fp32 | kda-sm90 | 10.0 | 2.00 | wrong |  | 2.00e-03 | 1.00e-06 | 1 |" in lines
    assert any(line.startswith("| 64 | 32 | 8 | fp32 | kda-sm90+verify | 100.0 |") for line in lines)
    assert any("fp32 states: **2.00x** (2.00 to 2.00; 1, 1 wrong)" in line for line in lines)


def test_page_compares_prefill_and_mixed_calls_with_their_parts():
    text = report_decode.page(data(), "h200")
    assert "| 525.0 | 1.050 times the call without a pool |" in text
    assert "| 540.0 | saves 10.0% of 600.0 us, the sum of prefill and decode |" in text
    assert "| 570.0 | saves 5.0% of 600.0 us, the sum of prefill and decode |" in text


def test_page_is_written_without_some_of_the_calls():
    alone = {"runs": [RECORD], "rows": [row("kda-sm90", 80.0)]}
    name, text = report.rendered("decode", alone, "h200")
    assert name == "h200-decode.md" and "Verification" not in text and "Prefill over" not in text
    assert report_decode.pictures(alone) == {}


def test_floor_with_a_wrong_value_is_wrong():
    assert report_decode.is_wrong(row("rmw", 1.0) | {"error_state": 1e-9})
    assert report_decode.is_wrong(row("kda-sm90", 1.0, error=float("nan")))
    assert not report_decode.is_wrong(row("rmw", 1.0))


def test_picture_has_correct_rows_of_one_token(tmp_path):
    (picture,) = report_decode.pictures(data()).values()
    assert picture.series == {
        "kda-sm90": {"N=1, HV=32": 2.0, "N=64, HV=32": 1.25},
        "kda-sm90+journal": {"N=64, HV=32": 0.75},
        "FLA": {"N=64, HV=32": 2.5},
    }
    assert picture.rows == ["N=1, HV=32", "N=64, HV=32"]
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    plots.draw(picture, tmp_path / "x.svg")


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.parent.name)
def test_committed_results_of_serving_have_every_shape_and_no_wrong_row(path):
    rows = json.loads(path.read_text())["rows"]
    measured = {tuple(r[n] for n in decode.KEY) for r in rows}
    ours = [
        r["impl"]
        for r in rows
        if r["impl"] != "rmw" and not peers.is_peer(r["impl"]) and "+" not in r["impl"]
    ]
    for T, N, HV, dtype in (
        (T, N, HV, d) for T in decode.T for N in decode.N for HV in decode.HV for d in pools.STATE_DTYPES
    ):
        for impl in (ours[0], *(["rmw"] if T == 1 else [])):
            assert ("decode", N, HV, T, impl, dtype) in measured
    assert {"prefill", "prefill without a pool", "mixed, prefill first"} <= {r["call"] for r in rows}
    wrong = [r for r in rows if not peers.is_peer(r["impl"]) and report_decode.is_wrong(r)]
    assert not wrong
