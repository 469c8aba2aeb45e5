"""Benchmarks: the cases contain all promised shapes, runs on any machine write correct rows, pages match the results."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import (
    pages,
    plans,
    records,
    repeated_keys,
    report,
    report_cp,
    report_decode,
    report_prefill,
    report_training,
    rows,
    run,
    training,
)  # fmt: skip
from helpers import fake_peers

from kda_core import chunk_kda
from kda_core.bench import cases, implementations, measure, peers, plots, steps
from kda_core.bench.prefill import draw
from kda_core.bench.training import draw as draw_training
from kda_core.registry import record_calls
from kda_core.testing import token_oracle
from kda_core.testing.gradients import token_gradients

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
LOOPBACK = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
CPU = torch.device("cpu")
RECORD = {"id": "r", "device": "h200", "device_name": "a GPU", "command": "benchmarks/run.py", "torch": "2",
          "versions": {"kda-sm90": "0.1", "kda-cp": "0.1", "fla-core": "0.6"}}  # fmt: skip


def committed(kind="*"):
    """Returns the committed results files of a kind."""
    return sorted((BENCHMARKS / "results").glob(f"*/{kind}.json"))


def script(name, *arguments, **options):
    """Runs a script of the benchmarks from another folder, as users do, and returns its standard output."""
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    done = subprocess.run(command, cwd=ROOT / "docs", capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- cases


def test_prefill_cases_contain_the_promised_shapes():
    found = {c.name: c for c in cases.prefill()}
    shapes = {(c.B, c.T, c.H, c.HV) for c in found.values() if not c.lengths}
    for B, T in ((1, 1024), (1, 4096), (1, 8192), (1, 16384), (2, 4096), (2, 8192)):
        for H in (64, 16, 32, 8):
            assert (B, T, H, 64) in shapes
    promised = {(1, 2048, 12, 12), (1, 8192, 32, 32), (1, 8192, 96, 96), (1, 65536, 4, 4), (2, 16384, 64, 64)}
    assert promised <= shapes
    packed = [c for c in found.values() if c.lengths and not c.use_graph]
    assert {len(c.lengths) for c in packed if c.H == 32} == {15, 16, 17, 18}
    for T in (4096, 8192):
        for n in (10, 20):
            of_size = {c.name.split("-")[1] for c in packed if (c.T, len(c.lengths), c.H) == (T, n, 64)}
            assert of_size == {"uniform", "random", "skewed"}
    assert cases.GATES == ("steep", "slow", "memory")


def test_prefill_cases_contain_the_shapes_of_blackwell():
    found = cases.prefill()
    fixed = {(c.B, c.T, c.H, c.HV) for c in found if not c.lengths}
    packed = {(c.name.split("-")[1], len(c.lengths), c.T, c.H, c.HV) for c in found if c.lengths}
    for H in (64, 16):
        assert fixed >= {(B, T, H, 64) for B in (1, 2) for T in (512, 1024, 4096, 8192, 16384)}
        for kind in ("uniform", "random", "skewed"):
            assert packed >= {(kind, n, T, H, 64) for n in (10, 20) for T in (4096, 8192, 16384)}
    # The tables of other architectures keep all of their cases.
    assert {c.name for c in found if c.table != "blackwell"} == {
        c.name for c in (*cases.public(), *cases.gva(), *cases.varlen(), *cases.padded())
    }


def test_names_and_lengths_of_packed_cases_are_consistent():
    for c in cases.prefill():
        assert c.name.startswith(("varlen-", "padded-")) == bool(c.lengths)
        assert not c.lengths or (c.B == 1 and min(c.lengths) >= cases.SHORTEST)
        assert c.use_graph == c.name.startswith("padded-")
        assert c.padding >= 0 and (c.padding == 0 or c.use_graph)
        assert c.HV % c.H == 0


def test_cases_of_context_parallelism_contain_the_promised_shapes():
    found = cases.context_parallel()
    assert len({c.name for c in found}) == len(found)
    assert {c.table for c in found} == {*cases.CONTEXT_PARALLEL}
    for H in (4, 8):
        shapes = {c.lengths or (c.B, c.T) for c in found if c.H == H}
        assert shapes >= {(1, n * 1024) for n in (4, 8, 32, 64, 128, 1024)}
        assert shapes >= {(8, 4096), (4, 8192), (2, 16384)}
        assert shapes >= {
            (32768, 256, 256),
            (40960, 1024, 8192),
            (65536, 32768, 16384),
            (131072, *[1024] * 10),
        }
    assert {c.T for c in found if c.H == 16} == {8192, 16384, 32768 + 7 * 4096, 65536, 262144}
    for c in found:
        assert c.HV == c.H and (not c.lengths or (c.B == 1 and sum(c.lengths) == c.T))


def test_training_cases_contain_the_promised_shapes():
    found = {c.lengths or (c.B, c.T, c.H, c.HV): c for c in cases.training()}
    fixed = {(1, 8192, 32, 32), (1, 8192, 64, 64), (2, 8192, 64, 64), (1, 8192, 16, 64), (1, 65536, 4, 4)}
    assert {*found} == fixed | {(1300, 547, 2048, 963, 271, 3063)}
    assert found[1300, 547, 2048, 963, 271, 3063].H == 64
    assert all("slow" in cases.training_gates(c) for c in found.values())
    assert {*cases.training_gates(found[1, 8192, 64, 64])} == {*cases.GATES}


def test_errors_are_measured_on_a_short_call_with_the_same_heads():
    for c in cases.training():
        short = cases.shortened(c, 1000)
        assert (short.B, short.H, short.HV, len(short.lengths)) == (1, c.H, c.HV, len(c.lengths))
        assert 900 < short.T <= 1000 and short.table == c.table
    assert cases.shortened(cases.packed("training", "x", (100, 3, 900), 1), 500).lengths == (33, 1, 300)


def test_hv_replaces_the_value_heads_of_table_gva():
    assert {c.HV for c in cases.prefill(128) if c.table == "gva"} == {128}
    with pytest.raises(ValueError, match="hv: expected a multiple of H=64, got 96"):
        cases.prefill(96)


# ---- rows


@pytest.mark.parametrize("gates", ["slow", "memory"])
@pytest.mark.parametrize("T", [96, 160])
def test_padded_case_sets_use_graph_and_compares_only_its_sequences(T, gates, monkeypatch):
    case = cases.Case("padded-64+32", "padded", 1, T, 1, 1, (64, 32), use_graph=True)
    x = draw(case, gates)
    assert case.padding == T - 96 and x.arguments["q"].shape[1] == T
    assert x.arguments["cu_seqlens"].tolist() == [0, 64, 96] and x.lengths == (64, 32)
    seen = []

    def named(name, call):
        seen.append(call)
        return implementations.backend("reference")

    monkeypatch.setattr(plans, "named", named)
    (row,) = rows.measure_rows(case, gates, x, ["reference", "fla"], CPU, rows.Options(repeats=1))
    assert seen[0]["use_graph"] and seen[0]["max_num_seqs"] == 2 and row["impl"] == "reference"
    assert 0 < row["error_o"] < 1e-2 and 0 < row["error_state"] < 1e-2 and row["lengths"] == [64, 32]


def test_unbounded_gates_use_the_inputs_of_a_family_without_its_bound():
    case = cases.fixed("public", 1, 100, 2)
    x, bounded = (draw(case, gates).arguments for gates in ("slow-unbounded", "slow"))
    assert bounded["lower_bound"] == -5.0 and "lower_bound" not in x and x["use_gate_in_kernel"]
    assert x["g"].equal(bounded["g"]) and {*cases.UNBOUNDED.values()} < {*cases.GATES}


def test_brute_force_and_certified_decay_are_measured(monkeypatch):
    case = cases.packed("cp", "3K+1100", (3072, 1100, 0), 1)
    monkeypatch.setattr(rows, "SEGMENT_TOKENS", (1024, 2048, 4096))
    options = rows.Options(repeats=1, lengths_on_host=True, brute_force=True, most_segments=2)
    impls = ["reference", "reference+cp", "reference+certified"]
    serial, cp, certified = rows.measure_rows(case, "slow", draw(case, "slow"), impls, CPU, options)
    assert cp["best_fixed_ms"] > 0 and cp["best_fixed_tokens"] in (1024, 2048, 3072)
    assert certified["plan"].startswith("certified") and certified["pieces"] > 1
    assert certified["error_o"] <= 1.2 * serial["error_o"] and "best_fixed_ms" not in serial


def test_equal_segments_leave_the_rest_to_the_last_segment():
    assert rows.equal_segments((3072, 1100, 0), 1024).segments == ((1024, 1024, 1024), (1024, 76), (0,))
    assert not rows.equal_segments((3072, 1100, 0), 3072).is_split


# ---- training


@pytest.fixture
def one_thread():
    """Small problems on one thread: on a busy machine, threads that wait for each other cost far more than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def install_peers(monkeypatch, calls):
    """Installs stand-ins for FLA and cuDNN frontend, which call the reference and append their arguments to `calls`."""

    def fla(**x):
        calls.append(("fla", x))
        return chunk_kda(**x, backend="reference")

    fake_peers.install(monkeypatch, {"fla.ops.kda.chunk_kda": fla, fake_peers.CUDNN: fake_peers.cudnn(calls)})


@pytest.mark.parametrize("case", [cases.fixed("training", 2, 40, 1), cases.packed("training", "x", (30, 17), 1)],
                         ids=["fixed", "packed"])  # fmt: skip
@pytest.mark.parametrize("gates", ["slow", "memory"])
def test_training_steps_of_peers_are_measured_on_the_same_inputs(gates, case, monkeypatch, one_thread):
    calls = []
    install_peers(monkeypatch, calls)
    chosen = training.calls(case, ["reference", "fla", "cudnn"], [False, True])
    assert chosen == [
        ("fla", False),
        ("fla", True),
        ("reference", False),
        ("reference", True),
        ("cudnn", False),
    ]
    fla, fla_keeps, mine, _, cudnn = training.measure_rows(
        case, gates, chosen, CPU, repeats=1, error_tokens=64
    )
    assert {x.get("disable_recompute", False) for name, x in calls if name == "fla"} == {False, True}
    assert all(x["safe_gate"] for name, x in calls if name == "fla")
    assert all(x.get("dt_bias") is None or x["dt_bias"].dim() == 1 for name, x in calls if name == "fla")
    given = next(x for name, x in calls if name == "cudnn")
    assert given["q"].shape == (case.B * case.T, case.H, 128) and given["plan_name"] == "kda_hopper_cuda"
    assert given["g"].dtype == given["beta"].dtype == torch.float32 and given["q"].dtype == torch.bfloat16
    assert given["cu_seqlens"].tolist() == ([0, 40, 80] if not case.lengths else [0, 30, 47])
    assert mine["difference_fla"] == 0 and fla["difference_fla"] is None is cudnn["difference_fla"]
    for row in (fla, fla_keeps, mine, cudnn):
        assert row["timing"] == "eager" and row["peak_bytes"] is None and row["step_ms"] > 0
        parameters = ("error_dA_log", "error_ddt_bias")
        for e in steps.ERRORS:
            if e in parameters and (gates == "memory" or row["prepared"]):
                assert row[e] is None
            else:
                assert 0 < row[e] < 1e-2, (row["impl"], e)
                assert 0 < row[steps.MEDIANS.get(e, e)] <= row[e], (row["impl"], e)
    assert [row["prepared"] for row in (fla, mine, cudnn)] == [False, False, True]


@pytest.mark.parametrize("gates", ["steep", "steep-unbounded", "memory"])
def test_prepared_arguments_have_the_values_that_the_kernel_would_compute(gates, one_thread):
    x = draw(cases.fixed("training", 2, 40, 1, 2), gates, initial_state=True).arguments
    found = peers.prepared(x)
    options = (
        "use_gate_in_kernel",
        "use_qk_l2norm_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "A_log",
        "dt_bias",
    )
    assert not found.keys() & {*options}
    (want_o, want_state), (o, state) = token_oracle(**x), token_oracle(**found)
    assert steps.gradient_error("v", o.view(want_o.shape), want_o, 2) < 4e-3  # q and k are rounded to bf16
    assert steps.gradient_error("initial_state", state.mT, want_state, 2) < 4e-3


@pytest.mark.parametrize("case", [cases.fixed("training", 2, 40, 1, 2), cases.packed("training", "x", (30, 17), 1)],
                         ids=["fixed", "packed"])  # fmt: skip
@pytest.mark.parametrize("gates", ["slow", "memory"])
def test_exact_gradients_in_segments_are_those_of_the_whole_loop(gates, case, monkeypatch, one_thread):
    monkeypatch.setattr(steps, "SEGMENT", 16)
    problem = steps.problem(draw_training(case, gates, initial_state=True), CPU, final_state=True)
    (o, state), found = steps.exact(problem)
    want_o, want_state = token_oracle(**problem.arguments)
    want = token_gradients(problem.arguments, *problem.grad_outputs).values
    torch.testing.assert_close((o, state), (want_o, want_state))
    assert found.keys() == want.keys() == problem.leaves.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, want[name])


def test_error_of_a_gradient_is_that_of_its_worst_head():
    second_head = {
        "q": ((2, 5, 3, 4), (slice(None), slice(None), 1)),
        "beta": ((2, 5, 3), (slice(None), slice(None), 1)),
        "dt_bias": ((12,), slice(4, 8)),
        "initial_state": ((2, 3, 4, 4), (slice(None), 1)),
    }
    for name, (shape, where) in second_head.items():
        x = torch.ones(shape)
        x[where] = 1.5
        assert steps.gradient_error(name, x, torch.ones(shape), 3) == pytest.approx(0.5)
    worse = steps.gradient_error("A_log", torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]), 2)
    assert worse == pytest.approx(0.1), "all heads together"
    one, none = torch.ones(1, 1, 2), torch.zeros(1, 1, 2)
    assert steps.gradient_error("beta", one, torch.tensor([[[1.0, 0.0]]]), 2) == float("inf")
    assert steps.gradient_error("beta", one * float("nan"), one, 2) == float("inf")
    assert steps.gradient_error("beta", none, none, 2) == 0
    three = torch.tensor([[[1.0, 1.1, 1.4]]])
    assert steps.head_errors("beta", three, torch.ones(1, 1, 3), 3).tolist() == pytest.approx([0.0, 0.1, 0.4])


def test_only_peers_are_timed_without_a_graph(monkeypatch, capsys, one_thread):
    def refuse(call, repeats):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "device_time", refuse)
    monkeypatch.setattr(measure, "event_time", lambda call, repeats: 2.0)
    install_peers(monkeypatch, [])
    small = steps.problem(draw(cases.fixed("training", 1, 8, 1), "slow"), CPU, final_state=False)
    found = steps.times(steps.Step("fla", small), torch.device("cuda"), 1)
    assert found == dict.fromkeys(("inference_ms", "forward_ms", "backward_ms", "step_ms"), 2.0) | {
        "timing": "events"
    }
    assert "operation not permitted" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="operation not permitted"):
        steps.times(steps.Step("reference", small), torch.device("cuda"), 1)


def test_backward_alone_runs_one_forward(one_thread):
    small = steps.problem(draw(cases.fixed("training", 1, 8, 1), "slow"), CPU, final_state=False)
    step = steps.Step("reference", small)
    with record_calls() as ran:
        backward = step.backwards()
        first, second = backward(), backward()
    assert [c.entry for c in ran] == ["chunk_fwd", "chunk_bwd", "chunk_bwd"]
    assert all(first[name].equal(second[name]) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"))


def test_training_writes_rows_and_keeps_rows_of_other_modes(tmp_path):
    path = tmp_path / "training.json"
    other = {
        "case": "B1-T128-H2",
        "gates": "slow",
        "impl": "reference",
        "disable_recompute": True,
        "run": "before",
    }
    path.write_text(json.dumps({"runs": [{"id": "before"}], "rows": [other]}))
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    script("training.py", "--gates", "slow", "--disable-recompute", "no", "--repeats", "1", "--error-tokens", "64", "--out", str(path), env=one_thread)  # fmt: skip
    kept, row = json.loads(path.read_text())["rows"]
    assert kept == other
    assert {
        "case",
        "gates",
        "impl",
        "B",
        "T",
        "H",
        "HV",
        "forward_ms",
        "backward_ms",
        "step_ms",
        "inference_ms",
    } <= row.keys()
    assert (row["impl"], row["disable_recompute"], row["error_case"]) == ("reference", False, "B1-T64-H2")
    assert all(0 < row[e] < 1e-2 for e in steps.ERRORS)
    with pytest.raises(SystemExit, match="--case: expected one of B1-T8192-H32, .*, got B9"):
        training.main(["--case", "B9"])


# ---- commands


def test_run_writes_rows_with_errors_and_keeps_rows_of_other_runs(tmp_path):
    path = tmp_path / "prefill.json"
    first = {"case": "other", "gates": "slow", "impl": "reference", "run": "before"}
    replaced = {"case": "B1-T2048-H4", "gates": "slow", "impl": "reference", "run": "stale"}
    path.write_text(json.dumps({"runs": [{"id": "before"}, {"id": "stale"}], "rows": [first, replaced]}))
    script("run.py", "--case", "B1-T2048-H4", "--gates", "slow", "--impl", "reference", "--repeats", "1",
           "--out", str(path))  # fmt: skip
    found = json.loads(path.read_text())
    assert found["rows"][0] == first and len(found["rows"]) == 2
    row = found["rows"][1]
    assert {"case", "B", "T", "H", "HV", "gates", "impl", "median_ms", "eager_ms"} <= row.keys()
    assert 0 < row["error_o"] < 1e-2 and 0 <= row["error_state"] < 1e-2 and row["eager_ms"] > 0
    assert [r["id"] for r in found["runs"]] == ["before", row["run"]], "a record without rows is dropped"


def test_resume_measures_only_what_an_interrupted_run_lacks(tmp_path, monkeypatch):
    measured = []

    def measure_rows(case, gates, x, impls, device, options):
        measured.append(gates)
        times = dict.fromkeys(("median_ms", "eager_ms", "error_o", "error_state"), 0.5)
        return [{"case": case.name, "gates": gates, "impl": name} | times for name in impls]

    monkeypatch.setattr(rows, "measure_rows", measure_rows)
    path = tmp_path / "prefill.json"
    command = ["--case", "B1-T2048-H4", "--impl", "reference", "--out", str(path), "--gates"]
    assert run.main([*command, "slow", "steep"]) == 0
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"rows": data["rows"][:1]}))
    assert run.main([*command, "slow", "steep", "--resume"]) == 0
    assert measured == ["slow", "steep", "steep"]
    assert json.loads(path.read_text()) == data
    with pytest.raises(SystemExit, match="no run of this command"):
        run.main([*command, "memory", "--resume"])


def test_recorded_command_has_no_path_of_the_machine():
    argv = ["--table", "gva", "--out", "/somewhere/prefill.json", "--hv", "32", "--resume"]
    assert records.command(argv, run.SCRIPT) == "benchmarks/run.py --table gva --hv 32"
    assert records.command(["--out=/somewhere/x.json"], run.SCRIPT) == "benchmarks/run.py"


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(SystemExit, match="--case: expected one of B1-T2048-H12, .*, got B9-T9-H9"):
        run.main(["--case", "B9-T9-H9"])
    with pytest.raises(
        SystemExit, match="--table: expected tables of prefill or of context parallelism, got both"
    ):
        run.main(["--table", "gva", "cp"])
    with pytest.raises(ValueError, match="impl: 'kda-sm01' cannot run here: known backends are reference, "):
        implementations.named("kda-sm01")


def test_run_of_context_parallelism_records_plans(tmp_path):
    path = tmp_path / "cp.json"
    script("run.py", "--table", "cp", "--case", "B1-T4096-H4", "--gates", "slow", "--repeats", "1", "--brute-force",
           "--segments", "2", "--out", str(path))  # fmt: skip
    serial, split = json.loads(path.read_text())["rows"]
    assert (serial["impl"], split["impl"]) == ("reference", "reference+cp")
    assert split["plan"].startswith("serial") and split["pieces"] == 1 and split["predicted_ms"] is None
    assert split["best_uniform_ms"] > 0 and split["best_uniform_pieces"] in (1, 2)


def test_host_times_are_measured_on_any_machine(tmp_path):
    path = tmp_path / "host.json"
    out = script("host.py", "--backend", "nothing", "--T", "5", "--calls", "2", "--rounds", "1",
                 "--context-parallel", "auto", "off", "--out", str(path))  # fmt: skip
    head, *lines = out.splitlines()[1:-1]
    assert head.split() == ["case", "nothing", "auto", "nothing", "off"] and len(lines) == 19
    assert all(float(us) > 0 for line in lines for us in line.split()[-2:])
    assert lines[-1].startswith("gate in kernel, new shape")
    data = json.loads(path.read_text())
    assert len(data["rows"]) == 38 and {r["context_parallel"] for r in data["rows"]} == {"auto", "off"}
    assert data["runs"][0]["command"].startswith("benchmarks/host.py --backend nothing --T 5")
    name, page = report.rendered("host", data, "cpu")
    assert name == "cpu-host.md" and "### T = 5, H = 1" in page
    assert "| case | nothing auto | nothing off | run |" in page


def test_errors_of_repeated_keys_are_measured_on_any_machine(capsys):
    assert repeated_keys.main(["--T", "64", "--H", "1"]) == 0
    head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["T", "beta", "reference", "o", "reference", "state"]
    assert [line[1] for line in lines] == ["random", "1.0", "1.5", "1.9", "2.0"]
    assert all(0 < float(e) < 3e-3 for line in lines for e in line[2:3])  # o is rounded to bf16 once


def test_several_ranks_are_compared_with_one(tmp_path):
    out = tmp_path / "cp_multi_gpu.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(BENCHMARKS / "multi_gpu.py"), "--T", "300", "--H", "1", "--repeats", "1", "--backend", "reference",
               "--out", str(out)]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=LOOPBACK)
    assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text())
    assert [row["fragments"] for row in data["rows"]] == ["contiguous", "zigzag"]
    assert all((row["ranks"], row["T"]) == (2, 300) and row["difference"] < 1e-3 for row in data["rows"])
    assert "| 1, 300, 1 | slow | 2 | contiguous |" in report.rendered("cp_multi_gpu", data, "cpu")[1]


# ---- pages


def prefill_row(case, gates, impl, ms, error=1e-3, table="public"):
    """Returns a row of prefill."""
    known = {"B": 1, "T": 100, "H": 1, "HV": 1, "lengths": [], "eager_ms": ms, "run": "r", "median_ms": ms}
    return known | {
        "case": case, "table": table, "gates": gates, "impl": impl, "error_o": error, "error_state": error,
    }  # fmt: skip


def test_summary_of_prefill_begins_with_unbounded_gates():
    found = [
        prefill_row("a", "slow", "kda-sm90", 1.0), prefill_row("a", "slow", "fla", 8.0),
        prefill_row("b", "slow", "fla", 3.0, table="gva"), prefill_row("b", "slow", "kda-sm90", 1.5, table="gva"),
        prefill_row("c", "slow", "kda-sm90", 9.0),
        prefill_row("a", "slow-unbounded", "kda-sm90", 1.0), prefill_row("a", "slow-unbounded", "fla", 2.0),
        prefill_row("b", "slow-unbounded", "kda-sm90", 0.1, error=2e-3), prefill_row("b", "slow-unbounded", "fla", 4.0),
        prefill_row("c", "slow-unbounded", "kda-sm90", 1.0, error=9e-4), prefill_row("c", "slow-unbounded", "fla", 8.0),
    ]  # fmt: skip
    head, _, model, bounded, *_, errors = report_prefill.summary({"runs": [RECORD], "rows": found})
    assert head == "| gates | impl | published shapes | all shapes |"
    assert model == (
        "| softplus, slow decay (Kimi Linear's gate) | kda-sm90 | **4.00x** (2.00 to 8.00; 2, 1 wrong) |  |"
    )
    assert bounded.endswith("| **8.00x** (8.00 to 8.00; 1) | **4.00x** (2.00 to 8.00; 2) |")
    assert "0.90 to 2.00 times FLA's" in errors
    unmeasured = dict.fromkeys(("error_o", "error_state"))
    *_, errors = report_prefill.summary({"runs": [RECORD], "rows": [found[0] | unmeasured, *found[1:]]})
    assert errors.endswith("0.90 to 2.00 times FLA's. 1 of 5 rows were measured without errors.")
    *_, errors = report_prefill.summary({"runs": [RECORD], "rows": [found[0] | unmeasured, found[1]]})
    assert errors == "- 1 of 1 rows were measured without errors."
    alone = report_prefill.summary({"runs": [RECORD], "rows": found[:1]})
    assert alone == ["The results have no row of FLA to compare with."]


def test_page_of_prefill_without_a_peer_shows_times_and_no_empty_column():
    found = [prefill_row("B1-T2048-H12", gates, "kda-sm90", 0.25) for gates in ("slow-unbounded", "slow")]
    data = {"runs": [RECORD | {"id": "r"}], "rows": [row | {"run": "r"} for row in found]}
    page = report_prefill.page(data, "other")
    assert "| case | gates | impl | device ms | eager ms | error o | error state | run |" in page
    assert "FLA 0" not in page and "vs FLA" not in page and "x floor" not in page
    times = report_prefill.pictures(data)["times"]
    assert list(times.texts.values()) == ["0.250 ms"] and "other-times.svg" in page


def training_row(case, impl, ms, gates="slow", mode=False, error=1e-3, **more):
    """Returns a row of training: a step of `ms` milliseconds, of which the backward takes three quarters."""
    known = dict.fromkeys((*steps.ERRORS, *steps.MEDIANS.values()), error) | {
        "table": "training", "B": 1, "T": 100, "H": 2, "HV": 2, "lengths": [], "prepared": impl == "cudnn", "timing": "graph",
        "inference_ms": ms / 5, "forward_ms": ms / 4, "backward_ms": ms * 3 / 4, "step_ms": ms, "eager_ms": ms,
        "peak_bytes": 2**30, "saved_bytes": 51200, "first_step_s": 1.0, "difference_fla": None, "error_case": case, "run": "r",
    }  # fmt: skip
    return known | {"case": case, "gates": gates, "impl": impl, "disable_recompute": mode} | more


def training_data():
    """Returns results of training that are made up."""
    found = [
        training_row("a", "fla", 8.0), training_row("a", "kda-sm90", 2.0, median_dbeta=1.4e-3, error_dq=5e-3, peak_bytes=2**29),
        training_row("a", "fla", 6.0, mode=True), training_row("a", "kda-sm90", 1.5, mode=True),
        training_row("a", "cudnn", 4.0, error=9e-3, error_dA_log=None),
        training_row("a", "fla", 9.0, gates="memory"), training_row("a", "kda-sm90", 3.0, gates="memory", error=2e-3),
        training_row("varlen-mixed-H2", "kda-sm90", 1.0, T=300, lengths=[100, 200]),
    ]  # fmt: skip
    versions = RECORD["versions"] | {"nvidia-cudnn-frontend": "1.32.0"}
    return {"runs": [RECORD | {"versions": versions}], "rows": found}


def test_page_of_training_compares_rows_of_one_mode_and_only_correct_ones():
    page = report_training.page(training_data(), "h200")
    lines = page.splitlines()
    assert (
        "| B=1, T=100, H=2 | kda-sm90 | no | 1.500 | 6.000 | 4.00x | 2.000 | 8.000 | 4.00x | 0.50 | 1.00 |"
        in lines
    )
    assert (
        "| B=1, T=100, H=2 | kda-sm90 | yes | 1.125 | 4.500 | 4.00x | 1.500 | 6.000 | 4.00x | 1.00 | 1.00 |"
        in lines
    )
    assert "| dq | 2.00 | 1.1 | 1 of 3 | a | memory | no | 5.00 |" in lines, (
        "the median head is that of memory"
    )
    assert "| dbeta | 2.00 | 1.5 | 1 of 3 | a | memory | no | 2.00 |" in lines, (
        "dbeta has 1.40 with slow gates"
    )
    assert "| dA_log | 2.00 | 1.0 | 1 of 3 | a | memory | no | 2.00 |" in lines
    (wrong,) = [line for line in lines if line.startswith("| a | memory | kda-sm90 | no | 0.600 ")]
    assert "| wrong |" in wrong
    (cudnn,) = [line for line in lines if line.startswith("| a | slow | cudnn | no | 0.800 ")]
    assert "| 0.800 | 1.000 (1.25) | 3.000 | 4.000 |  | 4.000 | 1.00 | 256 | 1 |" in cudnn, (
        "prepared: not compared"
    )
    (errors,) = [line for line in lines if line.startswith("| a | slow | cudnn | no | 9.00e-03 ")]
    assert "|  |" in errors
    assert "prepared" in page and "(`graph`)" in page and "nvidia-cudnn-frontend 1.32.0" in page
    assert "in the default mode: **4.00x** (4.00 to 4.00; 1), the geometric mean" in page
    assert "The results have no row of FLA" in report_training.page(
        {"runs": [RECORD], "rows": [training_row("a", "kda-sm90", 2.0)]}, "h200"
    )


def test_pictures_of_training_have_a_series_for_each_implementation(tmp_path):
    pictures = report_training.pictures(training_data())
    assert {*pictures} == {"training", "training-memory"}
    time = pictures["training"]
    assert {*time.series} == {"kda-sm90", "kda-sm90, disable_recompute", "FLA", "cuDNN, inputs prepared"}
    assert (
        time.rows == ["B=1, T=100, H=2", "2 mixed sequences, T=300, H=2"] and time.log and "ms" in time.xlabel
    )
    assert pictures["training-memory"].series["kda-sm90"]["B=1, T=100, H=2"] == 0.5
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    for picture in pictures.values():
        plots.draw(picture, tmp_path / "x.svg")
        assert {picture.title, picture.subtitle, picture.xlabel, *picture.rows, *picture.series} <= {
            *texts(tmp_path / "x.svg")
        }


def test_page_of_context_parallelism_summarises_only_correct_rows_of_the_planner():
    def row(case, impl, ms, error=1e-3, **more):
        known = {"table": "cp", "gates": "slow", "error_o": error, "error_state": error, "pieces": 1, "run": "r",
                 "B": 1, "T": 4096, "H": 4, "lengths": [], "predicted_ms": 0.5, "predicted_serial_ms": 1.0}  # fmt: skip
        return known | {"case": case, "impl": impl, "median_ms": ms} | more

    found = [
        row("a", "kda-sm90", 1.0), row("a", "kda-sm90+cp", 0.5, pieces=8, best_uniform_ms=0.48, best_uniform_pieces=9,
                                       best_fixed_ms=0.51, best_fixed_tokens=2048),
        row("a", "kda-sm90+certified", 4.0, pieces=8),
        row("b", "kda-sm90", 1.0), row("b", "kda-sm90+cp", 0.125, pieces=8), row("b", "fla", 2.0),
        row("c", "kda-sm90", 1.0), row("c", "kda-sm90+cp", 1.01),
        row("d", "kda-sm90", 1.0), row("d", "kda-sm90+cp", 0.01, error=2e-3, pieces=8),
    ]  # fmt: skip
    page = report_cp.page({"runs": [RECORD], "rows": found}, "h200")
    assert "| speed-up of split calls over serial ones | 2 | **4.00x** (2.00 to 8.00) |" in page
    assert "| time of calls that were not split, divided by direct calls' | 1 | 1.010 at most |" in page
    assert "| time divided by the best uniform plan's | 1 | 1.042 at most |" in page
    assert "| a | 0.500 | 0.510 | 2048 |" in page
    (certified,) = [line for line in page.splitlines() if "| kda-sm90+certified |" in line]
    assert "| 4.000 |" in certified and "| 0.25x |" in certified, "shown, but in no summary"
    (wrong,) = [line for line in page.splitlines() if line.startswith("| d ")]
    assert "| wrong |" in wrong and "| 2.000 |" in page


@pytest.mark.parametrize("path", committed(), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_committed_page_is_generated_from_the_committed_results(path):
    name, text = report.rendered(path.stem, json.loads(path.read_text()), path.parent.name)
    assert (report.DOCS / name).read_text() == text, (
        "run: python benchmarks/report.py benchmarks/results/*/*.json"
    )


#: The tables of cases.PREFILL and the implementations that the prefill results of a GPU contain.
MEASURED = {
    "h200": (("public", "gva", "varlen", "padded"), ("kda-sm90", "fla")),
    "h100": (("public",), ("kda-sm90",)),
}


@pytest.mark.parametrize("path", committed("prefill"), ids=lambda p: p.parent.name)
def test_committed_prefill_results_have_every_case(path):
    data = json.loads(path.read_text())
    tables, impls = MEASURED[path.parent.name]
    measured = {(r["case"], r["gates"], r["impl"]) for r in data["rows"]}
    for c in cases.prefill():
        for gates in cases.GATES if c.table in tables else ():
            assert {(c.name, gates, i) for i in impls if not (c.use_graph and i == "fla")} <= measured
    for c in cases.public():
        assert {(c.name, gates, i) for gates in cases.UNBOUNDED for i in impls} <= measured


#: The training cases in which the results of a GPU contain FLA, where these are not all.
FLA_TRAINS = {"h100": ("B1-T8192-H64", "B2-T8192-H64")}


@pytest.mark.parametrize("path", committed("training"), ids=lambda p: p.parent.name)
def test_committed_training_results_have_every_case(path):
    data = json.loads(path.read_text())
    measured = {(r["case"], r["gates"], r["impl"], r["disable_recompute"]) for r in data["rows"]}
    beside_fla = FLA_TRAINS.get(path.parent.name, [c.name for c in cases.training()])
    for c in cases.training():
        impls = ("kda-sm90", "fla") if c.name in beside_fla else ("kda-sm90",)
        for gates in cases.training_gates(c):
            assert {(c.name, gates, i, mode) for i in impls for mode in (False, True)} <= measured


def test_index_links_every_page():
    index = (report.DOCS / "index.md").read_text()
    for path in report.DOCS.glob("*.md"):
        assert path.name == "index.md" or f"]({path.name}" in index, path.name


def test_readme_shows_the_summary_of_the_committed_results():
    path = BENCHMARKS / "results" / "h200" / "prefill.json"
    readme = (ROOT / "README.md").read_text()
    _, _, *lines = report_prefill.summary(json.loads(path.read_text()))
    families = [line for line in lines if line.startswith("| ")]
    assert len(families) == len(report_prefill.FAMILIES)
    for line in families:
        family, _, published, everything = (cell.strip() for cell in line.strip("|").split("|"))
        assert any(
            family in shown and published in shown and everything in shown for shown in readme.splitlines()
        )
    for kind, call in (("training", "training step"), ("decode", "decoding")):
        data = json.loads(path.with_stem(kind).read_text())
        found = {"training": report_training, "decode": report_decode}[kind].headline(data)
        assert any(f"| [{call}]" in shown and f"| {found} |" in shown for shown in readme.splitlines()), found
        lines.append(found)
    figures = {x for line in lines for x in re.findall(r"\d\.\d\dx", line)}
    assert {*re.findall(r"\d\.\d+ ?x\b", readme)} <= figures, "a speed-up that the summary does not have"


# ---- pictures


def texts(path):
    """Returns the texts of an SVG file."""
    return [
        html.unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), re.DOTALL)
    ]


@pytest.mark.parametrize("path", committed(), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_committed_pictures_show_the_committed_results(path):
    pictures = report.REPORTS[path.stem].pictures(json.loads(path.read_text()))
    assert pictures
    for name, picture in pictures.items():
        file = report.DOCS / f"{path.parent.name}-{name}.svg"
        expected = {picture.title, picture.subtitle, picture.xlabel, *picture.rows, *picture.texts.values()}
        expected |= {*picture.series} if len(picture.series) > 1 else set()
        assert expected <= {*texts(file)}, file.name
        size = re.search(r'<svg [^>]*width="([\d.]+)pt" height="([\d.]+)pt"', file.read_text())
        width, height = (float(points) * 96 / 72 for points in size.groups())
        assert width <= 800 and height <= 720, f"{file.name}: {width:.0f} x {height:.0f} px"


def test_no_picture_is_left_of_earlier_results():
    known = {
        f"{path.parent.name}-{name}.svg"
        for path in committed()
        for name in report.REPORTS[path.stem].pictures(json.loads(path.read_text()))
    }
    assert {path.name for path in report.DOCS.glob("*.svg")} == known


def test_plot_of_the_readme_shows_the_published_shapes_with_the_gate_of_kimi_linear():
    path = BENCHMARKS / "results" / "h200" / "prefill.json"
    data = json.loads(path.read_text())
    picture = report_prefill.pictures(data)["speedup"]
    assert "Kimi Linear" in picture.subtitle and pages.peer_name(data) in picture.title
    published = [r for r in data["rows"] if (r["table"], r["gates"]) == ("public", "slow-unbounded")]
    assert {*picture.rows} == {report_prefill.label(r) for r in published}
    assert len(picture.rows) == len(cases.public())
    assert "docs/benchmarks/h200-speedup.svg" in (ROOT / "README.md").read_text()


def test_pages_only_writes_no_pictures(tmp_path, capsys):
    results = tmp_path / "prefill.json"
    found = [prefill_row("a", "slow", "kda-sm90", 1.0), prefill_row("a", "slow", "fla", 2.5)]
    results.write_text(json.dumps({"runs": [RECORD], "rows": found}))
    assert report.main([str(results), "--pages-only", "--out", str(tmp_path / "docs")]) == 0
    assert [path.name for path in (tmp_path / "docs").iterdir()] == ["h200.md"]
    assert capsys.readouterr().out.strip() == str(tmp_path / "docs" / "h200.md")


def test_matplotlib_draws_bars_and_dots(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    one = plots.Picture(
        "?", "title", "subtitle", "x / ms", {"a": {"row": 2.5}}, {"row": "2.50x"}, {"row": (2, 3)}
    )
    two = plots.Picture("?", "title", "subtitle", "x / ms", {"a": {"row": 2.5}, "b": {"other": 20}}, log=True)
    for picture in (one, two):
        plots.draw(picture, tmp_path / "x.svg")
        shown = {picture.title, picture.subtitle, picture.xlabel, *picture.rows, *picture.texts.values()}
        assert shown <= {*texts(tmp_path / "x.svg")}
    many = plots.Picture("?", "title", "", "", {"a": dict.fromkeys(map(str, range(50)), 1.0)})
    with pytest.raises(ValueError, match="picture: expected at most 24 rows, got 50: title"):
        plots.draw(many, tmp_path / "x.svg")
