"""The benchmark cases are those that the project promises to measure, and a run on any machine leaves a true file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LOOPBACK = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import registry

    return registry


def test_every_promised_shape_is_registered(registry):
    cases = {c.name: c for c in registry.cases()}
    shapes = {(c.B, c.T, c.H, c.HV) for c in cases.values() if not c.lengths}
    for B, T in ((1, 1024), (1, 4096), (1, 8192), (1, 16384), (2, 4096), (2, 8192)):
        for H in (64, 16, 32, 8):
            assert (B, T, H, 64) in shapes
    for B, T, H, HV in (
        (1, 2048, 12, 12),
        (1, 8192, 32, 32),
        (1, 8192, 96, 96),
        (1, 65536, 4, 4),
        (2, 16384, 64, 64),
    ):
        assert (B, T, H, HV) in shapes
    packed = [c for c in cases.values() if c.lengths and not c.use_graph]
    assert {len(c.lengths) for c in packed if c.H == 32} == {15, 16, 17, 18}
    for T in (4096, 8192):
        for n in (10, 20):
            assert {c.name.split("-")[1] for c in packed if (c.T, len(c.lengths), c.H) == (T, n, 64)} == {
                "uniform", "random", "skewed",
            }  # fmt: skip
    assert registry.GATES == ("steep", "slow", "memory")


def test_the_shapes_of_blackwell_are_registered(registry):
    cases = registry.cases()
    fixed = {(c.B, c.T, c.H, c.HV) for c in cases if not c.lengths}
    packed = {(c.name.split("-")[1], len(c.lengths), c.T, c.H, c.HV) for c in cases if c.lengths}
    for H in (64, 16):
        assert fixed >= {(B, T, H, 64) for B in (1, 2) for T in (512, 1024, 4096, 8192, 16384)}
        for kind in ("uniform", "random", "skewed"):
            assert packed >= {(kind, n, T, H, 64) for n in (10, 20) for T in (4096, 8192, 16384)}
    # Tables that have been measured elsewhere have lost none of theirs.
    assert {c.name for c in cases if c.table != "blackwell"} == {
        c.name for c in (*registry.public(), *registry.gva(), *registry.varlen(), *registry.padded())
    }


def test_packed_cases_are_named_so_and_their_lengths_add_up(registry):
    for c in registry.cases():
        assert c.name.startswith(("varlen-", "padded-")) == bool(c.lengths)
        assert not c.lengths or (c.B == 1 and min(c.lengths) >= registry.SHORTEST)
        assert c.use_graph == c.name.startswith("padded-") and (c.behind == 0 or c.use_graph and c.behind > 0)
        assert c.HV % c.H == 0


@pytest.mark.parametrize("gates", ["slow", "memory"])
@pytest.mark.parametrize("T", [96, 160])
def test_a_padded_case_is_called_so_and_compared_where_its_sequences_are(registry, T, gates, monkeypatch):
    import implementations
    import run

    case = registry.Case("padded-64+32", "padded", 1, T, 1, 1, (64, 32), use_graph=True)
    x = run._inputs(case, gates)
    assert case.behind == T - 96 and x.arguments["q"].shape[1] == T
    assert x.arguments["cu_seqlens"].tolist() == [0, 64, 96] and x.lengths == (64, 32)
    seen = []

    def named(name, call):
        seen.append(call)
        return implementations.backend("reference")

    monkeypatch.setattr(implementations, "named", named)
    args = run._parser().parse_args(["--repeats", "1"])
    (row,) = run._measure(case, gates, x, ["reference", "fla"], torch.device("cpu"), args)
    assert seen[0]["use_graph"] and seen[0]["max_num_seqs"] == 2 and row["impl"] == "reference"
    assert 0 < row["error_o"] < 1e-2 and 0 < row["error_state"] < 1e-2 and row["lengths"] == [64, 32]


def test_the_number_of_value_heads_can_be_chosen(registry):
    assert {c.HV for c in registry.cases(128) if c.table == "gva"} == {128}
    with pytest.raises(ValueError, match="hv: expected a multiple of H=64, got 96"):
        registry.cases(96)


def test_a_run_leaves_rows_with_errors_and_keeps_those_of_other_runs(tmp_path):
    path = tmp_path / "prefill.json"
    first = {"case": "other", "gates": "slow", "impl": "reference", "run": "before"}
    unused = {"case": "B1-T2048-H4", "gates": "slow", "impl": "reference", "run": "stale"}
    path.write_text(json.dumps({"runs": [{"id": "before"}, {"id": "stale"}], "rows": [first, unused]}))
    command = [sys.executable, "run.py", "--case", "B1-T2048-H4", "--gates", "slow", "--impl", "reference",
               "--repeats", "1", "--out", str(path)]  # fmt: skip
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["rows"][0] == first and len(found["rows"]) == 2
    row = found["rows"][1]
    assert {
        "case",
        "B",
        "T",
        "H",
        "HV",
        "gates",
        "impl",
        "median_ms",
        "eager_ms",
        "error_o",
        "error_state",
    } <= row.keys()
    assert 0 < row["error_o"] < 1e-2 and 0 <= row["error_state"] < 1e-2 and row["eager_ms"] > 0
    assert [r["id"] for r in found["runs"]] == ["before", row["run"]], "a run without rows is not kept"


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import run

    measured = []

    def measure(case, gates, x, impls, device, args):
        measured.append(gates)
        times = dict.fromkeys(("median_ms", "eager_ms", "error_o", "error_state"), 0.5)
        return [{"case": case.name, "gates": gates, "impl": name} | times for name in impls]

    monkeypatch.setattr(run, "_measure", measure)
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


def test_unbounded_gates_are_a_family_without_its_bound(registry):
    import run

    case = registry.fixed("public", 1, 100, 2)
    x, bounded = (run._inputs(case, gates).arguments for gates in ("slow-unbounded", "slow"))
    assert bounded["lower_bound"] == -5.0 and "lower_bound" not in x and x["use_gate_in_kernel"]
    assert x["g"].equal(bounded["g"]) and {*registry.UNBOUNDED.values()} < {*registry.GATES}


def test_host_time_is_measured_on_any_machine(tmp_path, registry):
    path = tmp_path / "host.json"
    command = [sys.executable, "host.py", "--backend", "nothing", "--T", "5", "--calls", "2", "--rounds", "1",
               "--context-parallel", "auto", "off", "--out", str(path)]  # fmt: skip
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()[1:-1]
    assert head.split() == ["case", "nothing", "auto", "nothing", "off"] and len(rows) == 8
    assert all(float(us) > 0 for row in rows for us in row.split()[-2:])
    data = json.loads(path.read_text())
    assert (
        len(data["rows"]) == 16
        and rows[-1].startswith("gate in kernel, new shape")
        and {r["context_parallel"] for r in data["rows"]} == {"auto", "off"}
    )
    assert data["runs"][0]["command"].startswith("benchmarks/host.py --backend nothing --T 5")
    import report

    name, page = report.rendered("host", data, "cpu", None)
    assert (
        name == "cpu-host.md"
        and "## T = 5, H = 1" in page
        and "| case | nothing auto | nothing off | run |" in page
    )
    assert page.count(data["runs"][0]["id"]) == 1 + 8


def test_the_command_on_record_measures_again_and_names_no_path_of_the_machine(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import run

    argv = ["--table", "gva", "--out", "/somewhere/prefill.json", "--hv", "32"]
    assert run._command(argv) == "benchmarks/run.py --table gva --hv 32"


def test_the_shapes_of_context_parallelism_are_registered(registry):
    cases = registry.context_parallel()
    assert len({c.name for c in cases}) == len(cases) and {c.table for c in cases} == {
        *registry.CONTEXT_PARALLEL
    }
    for H in (4, 8):
        shapes = {(c.B, c.T) if not c.lengths else c.lengths for c in cases if c.H == H}
        assert shapes >= {(1, n * 1024) for n in (4, 8, 32, 64, 128, 1024)} | {
            (8, 4096),
            (4, 8192),
            (2, 16384),
        }
        assert shapes >= {
            (32768, 256, 256),
            (40960, 1024, 8192),
            (65536, 32768, 16384),
            (131072, *[1024] * 10),
        }
    assert {c.T for c in cases if c.H == 16} == {8192, 16384, 32768 + 7 * 4096, 65536, 262144}
    for c in cases:
        assert c.HV == c.H and (not c.lengths or (c.B == 1 and sum(c.lengths) == c.T))


def test_a_run_of_context_parallelism_records_plans_and_makes_a_page(tmp_path):
    command = [sys.executable, "run.py", "--table", "cp", "--case", "B1-T4096-H4", "--gates", "slow", "--repeats", "1",
               "--brute-force", "--pieces", "2", "--out", str(tmp_path / "cp.json")]  # fmt: skip
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    serial, split = json.loads((tmp_path / "cp.json").read_text())["rows"]
    assert (serial["impl"], split["impl"]) == ("reference", "reference+cp")
    assert split["plan"].startswith("serial") and split["pieces"] == 1 and split["predicted_ms"] is None
    assert split["best_uniform_ms"] > 0 and split["best_uniform_pieces"] in (1, 2)


def test_one_piece_length_for_all_sequences_and_certified_decay_are_measured(registry, monkeypatch):
    import run

    case, device = registry.packed("cp", "3K+1100", (3072, 1100, 0), 1), torch.device("cpu")
    monkeypatch.setattr(run, "FIXED", (1024, 2048, 4096))
    args = run._parser().parse_args(["--table", "cp", "--repeats", "1", "--brute-force", "--pieces", "2"])
    args.errors_up_to = 10_000
    serial, cp, certified = run._measure(
        case,
        "slow",
        run._inputs(case, "slow"),
        ["reference", "reference+cp", "reference+certified"],
        device,
        args,
    )
    assert cp["best_fixed_ms"] > 0 and cp["best_fixed_tokens"] in (1024, 2048, 3072)
    assert (
        certified["plan"].startswith("certified")
        and certified["pieces"] > 1
        and "best_fixed_ms" not in serial
    )
    assert certified["error_o"] <= 1.2 * serial["error_o"]
    assert run._fixed((3072, 1100, 0), 1024).segments == ((1024, 1024, 1024), (1024, 76), (0,))
    assert not run._fixed((3072, 1100, 0), 3072).is_split


def test_the_page_of_context_parallelism_summarises_right_rows_alone(registry):
    import report_cp

    def row(case, impl, ms, error=1e-3, **more):
        known = {"table": "cp", "gates": "slow", "error_o": error, "error_state": error, "pieces": 1}
        return (
            known
            | {"predicted_ms": 0.5, "predicted_serial_ms": 1.0, "case": case, "impl": impl, "median_ms": ms}
            | more
        )

    rows = [
        row("a", "kda-sm90", 1.0), row("a", "kda-sm90+cp", 0.5, pieces=8, best_uniform_ms=0.48, best_uniform_pieces=9,
                                       best_fixed_ms=0.51, best_fixed_tokens=2048),
        row("a", "kda-sm90+certified", 4.0, pieces=8),
        row("b", "kda-sm90", 1.0), row("b", "kda-sm90+cp", 0.125, pieces=8), row("b", "fla", 2.0),
        row("c", "kda-sm90", 1.0), row("c", "kda-sm90+cp", 1.01),
        row("d", "kda-sm90", 1.0), row("d", "kda-sm90+cp", 0.01, error=2e-3, pieces=8),
    ]  # fmt: skip
    run = {"id": "r", "device_name": "a GPU", "command": "x", "torch": "2", "versions": {"kda-cp": "0.1"}}
    page = report_cp.page({"runs": [run], "rows": rows}, "h200")
    assert "2 engaged rows: speed-up over serial 4.00x (geomean), at least 2.00x" in page
    assert "1 bypassed rows: at most 1.010x" in page and "at most 1.042x the best uniform plan" in page
    assert "- a: 0.500, with one piece length for all sequences at best 0.510 (2048 tokens)" in page
    (slow,) = [line for line in page.splitlines() if "+certified" in line]
    assert "| 4.000 |" in slow and "| 0.25x |" in slow, "it counts for no summary"
    (wrong,) = [line for line in page.splitlines() if line.startswith("| d ")]
    assert "| wrong |" in wrong and "| 2.000 |" in page


def test_errors_of_one_key_over_and_over_are_measured_on_any_machine(registry, capsys):
    import repeated_keys

    assert repeated_keys.main(["--T", "64", "--H", "1"]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["T", "beta", "reference", "o", "reference", "state"]
    assert [row[1] for row in rows] == ["random", "1.0", "1.5", "1.9", "2.0"]
    assert all(0 < float(e) < 3e-3 for row in rows for e in row[2:3])  # o is rounded to bf16 once


def test_several_ranks_are_measured_against_one(tmp_path, registry):
    out = tmp_path / "cp_multi_gpu.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "multi_gpu.py",
               "--T", "300", "--H", "1", "--repeats", "1", "--backend", "reference", "--out", str(out)]  # fmt: skip
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False, env=LOOPBACK)
    assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text())
    assert [row["fragments"] for row in data["rows"]] == ["contiguous", "zigzag"]
    assert all((row["ranks"], row["T"]) == (2, 300) and row["difference"] < 1e-3 for row in data["rows"])
    import report

    assert "| 1, 300, 1 | slow | 2 |" in report.rendered("cp_multi_gpu", data, "cpu", None)[1]


@pytest.mark.parametrize(
    "path", sorted((BENCHMARKS / "results").glob("*/*.json")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_the_committed_page_is_made_from_the_committed_results(path, registry):
    import report

    data, device = json.loads(path.read_text()), path.parent.name
    name, text = report.rendered(path.stem, data, device, f"{device}{report.SUFFIX[path.stem]}.svg")
    assert (report.DOCS / name).read_text() == text
    if path.stem != "prefill":
        return
    measured = {(r["case"], r["gates"], r["impl"]) for r in data["rows"]}
    for c in registry.cases():
        for gates in registry.GATES if c.table != "blackwell" else ():
            for impl in ("kda-sm90", *(() if c.use_graph else ("fla",))):
                assert (c.name, gates, impl) in measured


def row(case, gates, impl, ms, error=1e-3, table="public"):
    """A row of prefill."""
    known = {"B": 1, "T": 100, "H": 1, "HV": 1, "lengths": [], "eager_ms": ms, "run": "r", "median_ms": ms}
    return known | {
        "case": case,
        "table": table,
        "gates": gates,
        "impl": impl,
        "error_o": error,
        "error_state": error,
    }


def test_the_summary_of_prefill_begins_with_the_gates_of_the_models(registry):
    import report

    rows = [
        row("a", "slow", "kda-sm90", 1.0), row("a", "slow", "fla", 8.0), row("b", "slow", "fla", 3.0, table="gva"),
        row("b", "slow", "kda-sm90", 1.5, table="gva"), row("c", "slow", "kda-sm90", 9.0),
        row("a", "slow-unbounded", "kda-sm90", 1.0), row("a", "slow-unbounded", "fla", 2.0),
        row("b", "slow-unbounded", "kda-sm90", 0.1, error=2e-3), row("b", "slow-unbounded", "fla", 4.0),
        row("c", "slow-unbounded", "kda-sm90", 1.0, error=9e-4), row("c", "slow-unbounded", "fla", 8.0),
    ]  # fmt: skip
    head, _, model, bounded, *_, errors = report.summary(rows)
    assert head == "| gates | impl | published shapes | all shapes |"
    assert model == (
        "| softplus, slow decay (Kimi Linear's gate) | kda-sm90 | **4.00x** (2.00 to 8.00; 2, 1 wrong) |  |"
    )
    assert bounded.endswith("| **8.00x** (8.00 to 8.00; 1) | **4.00x** (2.00 to 8.00; 2) |")
    assert "0.90 to 2.00 times FLA's" in errors
    assert report.summary(rows[:1]) == ["No row of FLA to compare with."]


def test_the_readme_shows_the_summary_of_the_committed_results(registry):
    import report

    data = json.loads((BENCHMARKS / "results" / "h200" / "prefill.json").read_text())
    readme = (BENCHMARKS.parent / "README.md").read_text()
    lines = report.summary(data["rows"])
    assert len(lines) == 12 and "\n".join(lines) in readme
    shown = {x for line in lines for x in re.findall(r"\d\.\d\dx", line)}
    assert set(re.findall(r"\d\.\d+ ?x\b", readme)) == shown, "no speed-up that the summary does not have"


def test_the_committed_plot_shows_the_published_shapes_with_the_gates_of_the_models(registry):
    import report

    data = json.loads((BENCHMARKS / "results" / "h200" / "prefill.json").read_text())
    rows = report.bars("prefill", data)
    assert {(r["gates"], r["table"]) for r in rows} == {("slow-unbounded", "public")}
    assert {r["case"] for r in rows} == {c.name for c in registry.public()}
    texts = re.findall(r"<text[^>]*>(.*?)</text>", (report.DOCS / "h200.svg").read_text())
    for r in rows:
        assert r["case"] in texts and report._speedup(r, rows) in ["", *texts]


@pytest.mark.parametrize("there", [True, False])
def test_without_matplotlib_a_plot_that_is_there_is_kept(registry, tmp_path, monkeypatch, capsys, there):
    import report

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    results, plot = tmp_path / "prefill.json", tmp_path / "docs" / "cpu.svg"
    run = {"id": "r", "device": "cpu", "device_name": "a CPU", "command": "x", "torch": "2", "versions": {}}
    results.write_text(json.dumps({"runs": [run], "rows": [row("a", "slow", "reference", 1.0)]}))
    if there:
        plot.parent.mkdir()
        plot.write_text("<svg/>")
    assert report.main([str(results), "--out", str(plot.parent)]) == 0
    said = capsys.readouterr().err
    assert said == f"matplotlib is not installed: {plot} is {'kept as it is' if there else 'not made'}\n"
    assert plot.exists() == there and (not there or plot.read_text() == "<svg/>")
    assert ("](cpu.svg)" in plot.with_suffix(".md").read_text()) == there


def test_with_matplotlib_a_plot_is_made(registry, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, as plots do")
    import report

    rows = [row("a", "slow", "kda-sm90", 1.0), row("a", "slow", "fla", 2.5)]
    assert report.plot(rows, tmp_path / "x.svg", "a GPU", labelled=True) == "x.svg"
    drawn = (tmp_path / "x.svg").read_text()
    assert ">2.50x<" in drawn and ">a GPU, gates: bounded below by -5, slow decay<" in drawn
