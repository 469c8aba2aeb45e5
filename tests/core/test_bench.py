"""``python -m kda_core bench``: what it selects, its report, failing implementations, and the calls of peers."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import inspect
import json
from pathlib import Path

import pytest
import torch
from helpers import fake_peers

from kda_core import chunk_kda
from kda_core.bench import cases, command, decode, implementations, peers, prefill, report
from kda_core.cli import main
from kda_core.registry import record_calls
from kda_core.testing import error, token_oracle

CPU = torch.device("cpu")
ONCE = ("--repeats", "1")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The tests measure on the CPU, on every machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def available(monkeypatch):
    """Peers run on every machine."""
    monkeypatch.setattr(peers, "unavailable", lambda impl, call, device: None)


def bench(capsys, *options, status=0):
    """Returns the report and the progress of a run."""
    assert main(["bench", *ONCE, *options]) == status
    return capsys.readouterr()


def rows_of(page):
    """Returns the rows of all tables of a report by their column names; the note of every failed row is kept."""
    found, columns = [], []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if cells and cells[0] == "case":
            columns = cells
        elif cells and columns and not cells[0].startswith("---"):
            found.append(dict(zip(columns, cells, strict=True)))
    return found


def refused(capsys, *options):
    """Returns the message of options that are refused."""
    with pytest.raises(SystemExit) as exit:
        main(["bench", *options])
    assert exit.value.code == 2
    return capsys.readouterr().err


# ---- the command


def test_all_calls_are_measured_without_a_gpu(capsys, tmp_path):
    path = tmp_path / "rows.json"
    with record_calls() as ran:
        shown = bench(capsys, "--quick", "--json", str(path))
    assert {(c.backend, c.entry) for c in ran} >= {
        ("reference", entry) for entry in ("chunk_fwd", "chunk_bwd", "recurrent_fwd")
    }
    assert {c.backend for c in ran} == {"reference"}
    rows = rows_of(shown.out)
    assert [(r["case"], r.get("gates", r.get("states")), r["impl"]) for r in rows] == [
        ("B1-T128-H2", "slow-unbounded", "reference"),
        ("B1-T128-H2", "slow", "reference"),
        ("N2-HV2-T1", "fp32", "reference"),
        ("N2-HV2-T1", "bf16", "reference"),
    ]
    for row in rows:
        assert row["timing"] == "eager" and row["relative"] == "1.00" and row["note"] == ""
        assert 0 < float(row["error o"]) < 1e-2
    assert "| torch | " + torch.__version__ in shown.out and "kda-core 0" in shown.out
    assert "`python -m kda_core bench --quick --repeats 1`" in shown.out
    assert len(shown.err.splitlines()) == 4 and shown.err.startswith(
        "[1/4] prefill B1-T128-H2 slow-unbounded"
    )
    data = json.loads(path.read_text())
    assert [r["call"] for r in data["rows"]] == ["prefill", "training", "decode", "decode"]
    assert data["environment"]["versions"]["kda-core"] == importlib.metadata.version("kda-core")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--case", "B1-T0-H2"], "--case: expected a name of kda_core.bench.cases, B1-T8192-H16-HV64 or N64-HV32-T1"),
        (["--call", "decode", "--case", "B1-T8-H2"], "of --call decode, got B1-T8-H2"),
        (["--case", "B1-T8-H2-HV3"], "got B1-T8-H2-HV3"),
        (["--backend", "sm91"], "--backend: expected some of reference, "),
        (["--call", "decode", "--peers", "cudnn"], "--peers: expected peers of --call decode, got cudnn, which has prefill"),
        (["--peers", "vllm"], "argument --peers: invalid choice: 'vllm'"),
        (["--repeats", "0"], "argument --repeats: expected a positive integer, got 0"),
        (["--json", "/nowhere/x.json"], "--json: expected a file in a folder that exists, got /nowhere/x.json"),
        (["--plot", "x.jpg"], "--plot: expected a file that ends in .svg or .png, got x.jpg"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused_before_anything_is_measured(capsys, options, said):
    assert said in refused(capsys, *options)


def test_plot_needs_matplotlib(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *x: None if n == "matplotlib" else find(n, *x))
    assert "--plot: expected matplotlib (pip install matplotlib), got no such package" in refused(
        capsys, "--plot", "x.svg"
    )


def test_plots_show_the_measured_times(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    options = (
        "--quick",
        "--call",
        "prefill",
        "decode",
        "--case",
        "B1-T64-H1",
        "N1-HV1-T1",
        "--peers",
        "none",
    )
    bench(capsys, *options, "--backend", "reference", "--plot", str(tmp_path / "x.svg"))
    assert {p.name for p in tmp_path.iterdir()} == {"x-prefill.svg", "x-decode.svg"}
    text = (tmp_path / "x-prefill.svg").read_text()
    assert "B1-T64-H1, slow-unbounded" in text and "Prefill on " in text
    bench(capsys, *options[:3], *options[4:6], "--peers", "none", "--plot", str(tmp_path / "y.png"))
    assert (tmp_path / "y.png").read_bytes().startswith(b"\x89PNG")


def test_cases_of_any_size_belong_to_the_calls_that_have_them(capsys):
    page = bench(
        capsys, "--case", "B2-T40-H1-HV2", "N3-HV1-T2", "--gates", "memory", "--backend", "reference", "--peers", "none"
    ).out  # fmt: skip
    found = {(r["case"], r.get("gates", r.get("states"))) for r in rows_of(page)}
    assert found == {("B2-T40-H1-HV2", "memory"), ("N3-HV1-T2", "fp32"), ("N3-HV1-T2", "bf16")}
    assert "### Prefill" in page and "### Training" in page and "### Decode" in page


def test_packed_cases_of_the_tables_are_known():
    (group,) = command.select(parsed("--call", "prefill", "--case", "varlen-mixed-H64", "--quick"), CPU)
    assert (group.call, group.case, group.variant) == (
        "prefill",
        "varlen-mixed-H64",
        {"gates": "slow-unbounded"},
    )


def parsed(*options):
    """Returns the options of a command line."""
    from kda_core import cli

    return cli._parser(["bench"]).parse_args(["bench", *options])


@pytest.mark.parametrize("quick", [True, False])
def test_default_cases_exist(quick, monkeypatch):
    monkeypatch.setattr(implementations, "default", lambda device, call: ["reference", *peers.names(call)])
    for call in peers.CALLS:
        groups = command.select(parsed("--call", call, *(["--quick"] if quick else [])), torch.device("cuda"))
        assert list(dict.fromkeys(g.case for g in groups)) == [
            *(command.QUICK if quick else command.DEFAULT)[call]
        ]
    assert "flashinfer" in groups[-1].impls and "flashinfer" not in groups[0].impls, "its states are bf16"


# ---- failures


def test_missing_peers_and_backends_are_rows_that_say_why(capsys, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(peers, "version", missing)
    page = bench(capsys, "--quick", "--call", "prefill", "--peers", "fla", "cudnn", "--backend", "sm90", "reference",
                 status=1).out  # fmt: skip
    notes = {r["impl"]: r["note"] for r in rows_of(page)}
    assert notes["reference"] == "" and notes["kda-sm90"].startswith(
        ("wrong-arch: runs on", "not-installed: ")
    )
    assert notes["fla"] == "fla-core is not installed: pip install fla-core"
    assert notes["cudnn+prepared"].startswith("nvidia-cudnn-frontend is not installed")


def test_a_peer_that_raises_is_a_row_and_no_failure_of_the_run(capsys, monkeypatch, available):
    def broken(**x):
        print("what a library prints")
        raise RuntimeError("no kernel | for this\nGPU " + "x" * 300)

    fake_peers.install(monkeypatch, {"fla.ops.kda.chunk_kda": broken})
    shown = bench(
        capsys, "--quick", "--call", "prefill", "training", "--peers", "fla", "--backend", "reference"
    )
    assert "what a library prints" in shown.err and "what a library prints" not in shown.out
    rows = rows_of(shown.out)
    assert [r["impl"] for r in rows] == ["reference", "fla"] * 2
    for row in rows[1::2]:
        assert row["note"].startswith(r"RuntimeError: no kernel \| for this GPU xxx") and row[
            "note"
        ].endswith("...")
    assert all(float(row["relative"]) == 1 for row in rows[::2])


def test_wrong_outputs_are_marked_and_not_compared(capsys, monkeypatch, available):
    def wrong(**x):
        o, state = chunk_kda(**x, backend="reference")
        return 1.1 * o, state

    fake_peers.install(monkeypatch, {"fla.ops.kda.chunk_kda": wrong})
    options = ("--quick", "--call", "prefill", "--case", "B1-T64-H1", "--backend", "reference")
    own, peer = rows_of(bench(capsys, *options, "--peers", "fla").out)
    assert (own["note"], own["relative"]) == ("", "1.00") and (peer["note"], peer["relative"]) == (
        "**wrong**",
        "",
    )
    named = implementations.named
    monkeypatch.setattr(
        implementations, "named", lambda name, **x: wrong if "reference" in name else named(name)
    )
    own, peer = rows_of(bench(capsys, *options, "--peers", "none", status=1).out) * 2
    assert own["note"] == "**wrong**"


@pytest.mark.parametrize("name", ["error_o", "error_state", "error_dq"])
def test_errors_that_are_not_finite_are_wrong(name):
    assert report.is_wrong({name: float("nan")}) and report.is_wrong({name: float("inf")})
    assert not report.is_wrong({name: 1e-3}) and not report.is_wrong({name: None})


def test_inputs_that_cannot_be_made_fail_all_rows_of_the_group():
    def start():
        raise MemoryError("too large")

    group = command.Group("prefill", "B1-T8-H1", {"gates": "slow"}, ("reference", "reference"), start)
    assert [row["failed"] for row in command.measured(group)] == ["MemoryError: too large"] * 2


def test_an_interrupted_run_reports_what_it_has(capsys, monkeypatch):
    measured = []

    def measure(group):
        if measured:
            raise KeyboardInterrupt
        measured.append(group)
        yield {"call": group.call, "case": group.case, "impl": "reference", "failed": "why"} | group.variant

    monkeypatch.setattr(command, "measured", measure)
    shown = bench(capsys, "--backend", "reference", "--peers", "none", status=130)
    assert len(rows_of(shown.out)) == 1 and "interrupted: the report has the rows" in shown.err


# ---- where peers run


@pytest.mark.parametrize(
    ("impl", "call", "capability", "found", "reason"),
    [
        ("cudnn", "prefill", (9, 0), "1.32.0", None),
        ("cudnn", "prefill", (10, 3), "1.32.0", None),
        ("cudnn", "training", (10, 0), "1.40", "serves sm_90 to sm_90 in training, this GPU is sm_100"),
        ("cudnn-hopper+prepared", "prefill", (9, 0), "2.0", None),
        ("cudnn-hopper", "training", (9, 0), "1.32.0", "has no training"),
        ("cudnn", "prefill", (9, 0), "1.31.9", "needs nvidia-cudnn-frontend 1.32 or newer, found 1.31.9"),
        ("flashinfer", "decode", (10, 0), "0.7.2.post1", None),
        ("flashinfer", "decode", (9, 0), "0.7.2.post1", "serves sm_100 to sm_107 in decode, this GPU is sm_90"),
        ("fla", "decode", (8, 0), "0.6.0", None),
    ],
)  # fmt: skip
def test_peers_run_where_they_are_installed_and_have_kernels(
    impl, call, capability, found, reason, monkeypatch
):
    monkeypatch.setattr(peers, "version", lambda name: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert peers.unavailable(impl, call, torch.device("cuda")) == reason
    assert peers.unavailable(impl, call, CPU) == (
        reason if reason and not reason.startswith("serves") else "needs a GPU"
    )


def test_peers_without_grouped_heads_or_padding_do_not_serve_them(capsys, monkeypatch, available):
    grouped = cases.fixed("custom", 1, 64, 1, 2)
    padded = cases.Case("padded", "padded", 1, 96, 1, 1, (64,), use_graph=True)
    served = lambda case: [n for n in peers.names("prefill") if implementations.serves(n, "prefill", case)]
    assert served(grouped) == ["fla", "cudnn", "cudnn+prepared"] and served(padded) == []
    fake_peers.install(monkeypatch, {fake_peers.CUDNN: fake_peers.cudnn([])})
    page = bench(capsys, "--quick", "--call", "prefill", "--case", grouped.name, "--peers", "cudnn-hopper", "cudnn",
                 "--backend", "reference").out  # fmt: skip
    notes = {r["impl"]: r["note"] for r in rows_of(page)}
    assert notes == {"reference": "", "cudnn": "", "cudnn+prepared": ""} | dict.fromkeys(
        ("cudnn-hopper", "cudnn-hopper+prepared"), "has no grouped value heads"
    )


# ---- calls of peers


@pytest.mark.parametrize("case", [cases.fixed("custom", 2, 70, 2), cases.packed("custom", "x", (30, 70), 2)],
                         ids=["fixed", "packed"])  # fmt: skip
@pytest.mark.parametrize("gates", ["slow", "slow-unbounded", "memory"])
def test_cudnn_gets_what_its_engines_compute_and_the_rest_is_computed_before(case, gates, monkeypatch):
    calls = []
    fake_peers.install(monkeypatch, {fake_peers.CUDNN: fake_peers.cudnn(calls)})
    problem = prefill.Prefill(case, gates, prefill.draw(case, gates), CPU, errors_up_to=1000)
    given = {}
    for impl in peers.names("prefill"):
        if impl == "fla":
            continue
        row, o = problem.measure(impl, implementations.named(impl), 1)
        assert 0 < row["error_o"] < 1e-2 and 0 < row["error_state"] < 1e-2, impl
        assert row["median_ms"] is None and row["eager_ms"] > 0 and o.shape == problem.arguments["v"].shape
        given[impl] = calls[-1][1]
    raw = gates != "memory"
    for impl, x in given.items():
        assert x["plan_name"] == (None if impl.startswith("cudnn+") or impl == "cudnn" else "kda_hopper")
        fused = impl == "cudnn"
        assert x["use_qk_l2norm_in_kernel"] is fused and x["use_beta_sigmoid_in_kernel"] is (fused and raw)
        assert x["safe_gate"] is (fused and gates == "slow")
        assert x["g"].dtype == (torch.bfloat16 if x["safe_gate"] else torch.float32)
        assert x["q"].shape == (case.B * case.T, 2, 128) and x["q"].dtype == torch.bfloat16
        assert x["cu_seqlens"].tolist() == ([0, 30, 100] if case.lengths else [0, 70, 140])
        assert (x["initial_state"] is None) == raw


def test_prepared_values_are_those_of_the_oracle():
    x = prefill.draw(cases.fixed("custom", 1, 40, 1, 2), "slow-unbounded").arguments
    (want, _), (o, _) = token_oracle(**x), token_oracle(**peers.prepared(x))
    assert error(o.view(want.shape), want) < 4e-3


def test_values_are_computed_by_one_compiled_function_for_any_number_of_shapes(monkeypatch):
    """torch compiles a function for eight shapes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for T in range(8, 18):
        x = prefill.draw(cases.fixed("custom", 1, T, 1), "slow").arguments
        tokens = [x[n] for n in ("q", "k", "g", "beta")]
        flags = {n: x.get(n) for n in (*peers.IN_KERNEL, "A_log", "dt_bias", "lower_bound")}
        for a, b in zip(peers.ready(*tokens, **flags), peers.fused()(*tokens, **flags), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("T", [1, 4])
def test_flashinfer_updates_the_states_of_a_pool_in_place(T, monkeypatch):
    calls = []
    fake_peers.install(monkeypatch, {fake_peers.FLASHINFER: fake_peers.flashinfer(calls)})
    problem = decode.make_problem(3, 2, T, T, "bfloat16", CPU, 0)
    launch = decode.launch("flashinfer", problem)
    found = launch.check()
    assert 0 < found["error_o"] < 1e-2 and 0 < found["error_state"] < 1e-2
    ((_, given),) = calls
    assert given["initial_state"] is problem.pool and given["q"].shape == (1, 3 * T, 2, 128)
    assert given["num_spec_tokens"] == (None if T == 1 else T - 1) and given["beta_is_logit"]
    assert given["use_gate_in_kernel"] and given["use_qk_l2norm_in_kernel"] and given["lower_bound"] == -5.0


@pytest.mark.parametrize(
    ("distribution", "file", "function", "fake"),
    [
        (
            "nvidia-cudnn-frontend",
            "cudnn/linear_attention/ops/kda.py",
            "kimi_delta_attention",
            fake_peers.cudnn,
        ),
        ("flashinfer-python", "flashinfer/kda.py", "recurrent_kda", fake_peers.flashinfer),
    ],
)
def test_stand_ins_have_the_signatures_of_the_installed_packages(distribution, file, function, fake):
    try:
        files = importlib.metadata.files(distribution) or ()
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")
    (path,) = (Path(f.locate()) for f in files if f.as_posix() == file)
    (found,) = (
        n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == function
    )
    expected = inspect.signature(fake([])).parameters
    assert [a.arg for a in (*found.args.args, *found.args.kwonlyargs)] == [*expected]
    defaults = [*found.args.defaults, *found.args.kw_defaults]
    shown = [p.default for p in expected.values() if p.default is not inspect.Parameter.empty]
    assert [ast.literal_eval(d) for d in defaults] == shown
