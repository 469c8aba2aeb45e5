"""Measures the host time of eager calls: the calls are asynchronous, and nothing waits for their kernels.

    python benchmarks/host.py                      # the backends that run here, and `nothing`
    python benchmarks/host.py --backend sm90 --T 64 --H 1
    python benchmarks/host.py --context-parallel auto off   # the difference is the cost of asking the planner

This script registers a backend `nothing`, which launches no kernel. Its time is that of kda-core alone, with the allocation
of o and of a workspace.

Each figure is a median over rounds: the time of all calls of a round, divided by their number, in microseconds. The GPU is
idle when a round starts. Columns alternate, so that a slow phase of the host affects all of them. If the kernels of a case
take longer than the host's work, the queue of the GPU fills up and the figure is the GPU's time. The last row measures first
calls: each has a new length, so its shape is in no cache. Calls that decode have one token of 8 sequences, whatever ``--T`` is.

Rows go to ``benchmarks/results/<gpu>/host.json``: case, T, H, backend, context_parallel, us, run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the folder of the package, not of this script

import kda_core
from benchmarks import records
from kda_core.backend import BackendSpec, PreparedLaunch
from kda_core.contract import Feature, KdaInputs, KdaJournal, KdaOutputs, KdaPool, ProblemShape
from kda_core.registry import REGISTRY, record_calls
from kda_core.serving import Journal, bind, journal_decode_kda, verify_kda

Call = Callable[[], object]

D = 128
#: Sequences of a call that decodes.
SEQUENCES = 8
PER_TOKEN = ("q", "k", "v", "g", "beta")
NEW_SHAPE = "gate in kernel, new shape"
KEY = ("case", "T", "H", "backend", "context_parallel")


class Nothing:
    """A `kda_core.backend.Backend` that leaves its outputs uninitialised."""

    def can_run(self, shape: ProblemShape) -> str | None:
        return None

    def workspace_bytes(self, shape: ProblemShape) -> int:
        return 1 << 18

    def compile(self, shape: ProblemShape) -> None:
        pass

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        return outputs

    def recurrent_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        return outputs

    def journal_decode(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        return outputs

    def journal_fold(self, shape: ProblemShape, pool: KdaPool, journal: KdaJournal) -> None:
        pass

    def prepare(self, inputs: KdaInputs, outputs: KdaOutputs) -> PreparedLaunch:
        return lambda *addresses: None


SPEC = BackendSpec(
    name="nothing",
    abi=kda_core.BACKEND_ABI,
    archs=frozenset({"any"}),
    features=frozenset({f.value for f in Feature} - {"backward"}),
    target="benchmarks.host:Nothing",
    install="",
    priority=-1000,
)


def main(argv: list[str] | None = None) -> int:
    """Measures the selection, prints a table and writes the rows."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--backend", nargs="+", help="backends by name (default: nothing, and on a GPU all that run there)"
    )
    p.add_argument("--T", type=int, default=64, help="tokens of a call (default: 64)")
    p.add_argument("--H", type=int, default=1, help="heads (default: 1)")
    p.add_argument("--context-parallel", nargs="+", choices=("auto", "off"), default=["auto"])
    p.add_argument("--calls", type=int, default=1000, help="calls a round (default: 1000)")
    p.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")
    p.add_argument("--out", type=Path, help="the JSON file")
    args = p.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    found: dict[str, list[float | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        _register(Path(folder))
        columns = list(itertools.product(args.backend or _backends(device), args.context_parallel))
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        print(
            f"T={args.T} H={args.H} on {name}, torch {torch.__version__}: us a call, {args.calls} calls a round"
        )
        print(f"{'case':<32}" + "".join(f"{' '.join(c):>14}" for c in columns))
        with torch.inference_mode():
            calls: list[Call | None]
            for case, x in cases(args.T, args.H, device).items():
                calls = [
                    partial(kda_core.chunk_kda, **x, backend=n, context_parallel=cp) for n, cp in columns
                ]
                found[case] = _measured(case, calls, columns, args)
            for case, make in bound_cases(args.T, args.H, device).items():
                calls = [make(n, cp) for n, cp in columns]
                found[case] = _measured(case, calls, columns, args)
            for case, make_one in decode_cases(args.H, device).items():
                calls = [make_one(n) for n, _ in columns]
                found[case] = _measured(case, calls, columns, args)
            found[NEW_SHAPE] = [*first_calls(columns, args.T, args.H, device, args.rounds)]
            _print(NEW_SHAPE, found[NEW_SHAPE])
        for case, row in found.items():
            for (backend, mode), us in zip(columns, row, strict=True):
                if us is None:
                    continue
                rows.append(dict(zip(KEY, (case, args.T, args.H, backend, mode), strict=True)) | {"us": us})
    run = records.describe(device, argv, "benchmarks/host.py")
    path = args.out or records.RESULTS / run["device"] / "host.json"
    records.save(path, run, [row | {"run": run["id"]} for row in rows], KEY)
    print(path)
    return 0


def cases(T: int, H: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Returns the arguments of ``chunk_kda`` for each case, by its name."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(torch.bfloat16)

    q, k, v, g = (normal(1, T, H, D) for _ in range(4))
    plain = {"q": q, "k": k, "v": v, "g": -g.abs().clamp(max=5), "beta": normal(1, T, H).sigmoid()}
    gated = plain | {
        "A_log": torch.zeros(H, device=device), "dt_bias": torch.zeros(H * D, device=device), "lower_bound": -5.0,
        "safe_gate": True, "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }  # fmt: skip
    state = torch.zeros(1, H, D, D, device=device)
    bounds = torch.tensor([0, T], dtype=torch.int32)
    stateful = gated | {"initial_state": state, "output_final_state": True}
    return {
        "precomputed gate": plain,
        "gate in kernel": gated,
        "packed": gated | {"cu_seqlens": bounds.to(device)},
        "packed, cu_seqlens_cpu": gated | {"cu_seqlens": bounds.clone().to(device), "cu_seqlens_cpu": bounds},
        "states": stateful,
        "out": gated | {"out": torch.empty_like(v)},
        "states, out": stateful | {"out": (torch.empty_like(v), torch.empty_like(state))},
    }


def bound_cases(T: int, H: int, device: torch.device) -> dict[str, Callable[[str, str], Call]]:
    """Returns for each case of a bound call of ``chunk_kda``, by its name, a function that makes the call for a backend and a mode of
    context parallelism."""
    x = cases(T, H, device)["gate in kernel"]
    tokens, out = {name: x[name] for name in PER_TOKEN}, torch.empty_like(x["v"])

    def make(owned: bool, backend: str, mode: str) -> Call:
        given: dict[str, Any] = x | {"backend": backend, "context_parallel": mode}
        if not owned:
            return partial(bind(kda_core.chunk_kda, **given), **tokens)
        size = kda_core.explain(**given).workspace_bytes
        given["workspace"] = torch.empty(size, dtype=torch.uint8, device=device)
        return partial(bind(kda_core.chunk_kda, **given), **tokens, out=out)

    return {"bound": partial(make, False), "bound, out and workspace": partial(make, True)}


def decode_cases(H: int, device: torch.device) -> dict[str, Callable[[str], Call | None]]:
    """Returns for each case, by its name, a function that makes the call for a backend; None if the backend does not serve it. A call
    decodes or verifies one token of `SEQUENCES` sequences over a pool."""
    x = cases(SEQUENCES, H, device)["gate in kernel"]
    tokens = {name: x[name].view(SEQUENCES, 1, *x[name].shape[2:]) for name in PER_TOKEN}
    others = {name: y for name, y in x.items() if name not in (*PER_TOKEN, "safe_gate")}
    pool = torch.zeros(SEQUENCES, H, D, D, device=device)
    slots = torch.arange(SEQUENCES, dtype=torch.int32, device=device)
    pooled = {
        "initial_state": pool,
        "ssm_state_indices": slots,
        "output_final_state": True,
        "state_v_first": True,
    }
    journal = Journal.allocate(SEQUENCES, H, D, D, state_v_first=True, dtype=torch.bfloat16, device=device)
    recorded = others | {"pool": pool, "slots": slots, "journal": journal}

    verified = others | {"pool": pool, "slots": slots, "records": journal}
    out = torch.empty_like(tokens["v"])

    def case(function: Callable[..., Any], given: dict[str, Any], feature: Feature, form: str) -> Any:
        def make(backend: str) -> Call | None:
            if feature.value not in REGISTRY.find(backend).spec.features:
                return None
            if not form:
                return partial(function, **tokens, **given, backend=backend)
            call = partial(bind(function, **tokens, **given, backend=backend), **tokens)
            return partial(call, out=out) if form.endswith("out") else call

        return make

    kinds: dict[str, tuple[Callable[..., Any], dict[str, Any], Feature]] = {
        "decode over a pool": (kda_core.fused_recurrent_kda, others | pooled, Feature.RECURRENT),
        "journal": (journal_decode_kda, recorded, Feature.JOURNAL),
        "verify": (verify_kda, verified, Feature.JOURNAL),
    }
    return {
        name + form: case(*kind, form)
        for name, kind in kinds.items()
        for form in ("", ", bound", ", bound, out")
    }


def _measured(
    case: str, calls: list[Call | None], columns: list[tuple[str, str]], args: argparse.Namespace
) -> list[float | None]:
    """Prints and returns the host time of each call that there is."""
    there = [(call, backend) for call, (backend, _) in zip(calls, columns, strict=True) if call is not None]
    times = iter(microseconds(there, args.calls, args.rounds))
    row = [None if call is None else next(times) for call in calls]
    _print(case, row)
    return row


def _print(case: str, row: Sequence[float | None]) -> None:
    print(f"{case:<32}" + "".join(f"{'-' if us is None else f'{us:.1f}':>14}" for us in row), flush=True)


def microseconds(kinds: list[tuple[Call, str]], calls: int, rounds: int) -> list[float]:
    """Returns the host time of each call in microseconds, and asserts that the named backend serves it."""
    synchronize: Callable[[], object] = (
        torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    )
    for call, backend in kinds:
        with record_calls() as ran:
            call()
        assert [c.backend for c in ran] == [backend], ran
    times: list[list[float]] = [[] for _ in kinds]
    for _, ((call, _), took) in itertools.product(range(rounds), zip(kinds, times, strict=True)):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        took.append((time.perf_counter() - start) / calls * 1e6)
    synchronize()
    return [statistics.median(took) for took in times]


def first_calls(
    columns: list[tuple[str, str]], T: int, H: int, device: torch.device, rounds: int
) -> list[float]:
    """Returns the host time of the first call of a shape in microseconds, for each column.

    Such a call checks its metadata and chooses its backend. The figure is the median over 40 * `rounds` lengths above T; the
    caches are cleared before each column.
    """
    lengths = range(T + 1, T + 1 + 40 * rounds)
    whole = cases(lengths[-1], H, device)["gate in kernel"]
    times: list[list[float]] = [[] for _ in columns]
    for (backend, mode), took in zip(columns, times, strict=True):
        kda_core.backends(refresh=True)
        kda_core.chunk_kda(**whole, backend=backend, context_parallel=mode)  # loads and compiles
        for length in lengths[:-1]:
            x = whole | {name: whole[name][:, :length] for name in PER_TOKEN}
            start = time.perf_counter()
            kda_core.chunk_kda(**x, backend=backend, context_parallel=mode)
            took.append((time.perf_counter() - start) * 1e6)
    return [statistics.median(took) for took in times]


def _register(folder: Path) -> None:
    """Registers `SPEC` as an installed backend of this process, through a distribution in a folder on ``sys.path``."""
    info = folder / "kda_nothing-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kda-nothing\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[kda_core.backends]\nnothing = benchmarks.host:SPEC\n")
    sys.path.insert(0, str(folder))
    kda_core.backends(refresh=True)


def _backends(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return ["nothing"]  # the time of the reference is that of its computation
    others = ("nothing", "reference", "fla")  # fla's host time is that of FLA
    return ["nothing", *(i.name for i in kda_core.backends() if i.status == "ok" and i.name not in others)]


if __name__ == "__main__":
    sys.exit(main())
