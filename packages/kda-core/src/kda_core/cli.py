"""``python -m kda_core``: demo, backends, explain, precompile, doctor, conformance. Plain text; colour only with ``rich``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from kda_core import api, contract
from kda_core.cute import ARCHITECTURES
from kda_core.errors import KdaError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status: 0 for success, 1 for a finding, 2 for wrong usage."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "conformance":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return args.run(args, rest)
    except KdaError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m kda_core", description="Kimi Delta Attention behind one API")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    p = commands.add_parser(
        "demo", help="KDA prefill of a real text, in one piece and in two, against the fp64 oracle"
    )
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    p.add_argument(
        "--tokens", type=_positive, help="length of the prefill (default: 65536 on a GPU, 4096 on a CPU)"
    )
    p.add_argument("--backend", help="insist on this backend")
    p.set_defaults(run=_demo)

    p = commands.add_parser("backends", help="every known backend and its status")
    p.set_defaults(run=_backends)

    p = commands.add_parser(
        "explain", help="which backend would serve a call of a given shape, and who refuses it"
    )
    p.add_argument("--B", type=_positive, default=1, help="batch size")
    p.add_argument("--T", type=int, default=8192, help="tokens a sequence")
    p.add_argument("--H", type=_positive, default=32, help="query/key heads")
    p.add_argument("--HV", type=_positive, help="value heads (default: H)")
    p.add_argument("--K", type=_positive, default=128, help="head dimension of q and k")
    p.add_argument("--V", type=_positive, default=128, help="head dimension of v")
    p.add_argument("--N", type=_positive, help="number of packed sequences (varlen, B=1, T tokens in all)")
    p.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of q, k, v and g")
    p.add_argument(
        "--arch", default=None, help="cpu, or a compute capability such as 9.0 (default: this machine's)"
    )
    p.add_argument("--initial-state", action="store_true")
    p.add_argument("--final-state", action="store_true")
    p.add_argument("--state-v-first", action="store_true")
    p.add_argument(
        "--gate", choices=("precomputed", "bounded", "softplus"), default="bounded", help="form of the gate"
    )
    p.add_argument("--pin", action="store_true")
    p.add_argument("--backward", action="store_true", help="a call whose inputs require grad")
    p.add_argument("--backend", help="insist on this backend")
    p.set_defaults(run=_explain)

    p = commands.add_parser(
        "precompile",
        help="compile the kernels of the installed backends into the cache folder, ahead of time",
        description="Compiles what the installed backends list for an architecture, in worker processes and without a "
        "GPU. The folder is that of KDA_CACHE_DIR; what is in it already is left alone. Kernels that are not listed "
        "compile when a call first needs them. Run it on a CPU like that of the machine that will use the kernels.",
    )
    p.add_argument("--arch", choices=list(ARCHITECTURES.values()), required=True, help="the GPU architecture")
    p.add_argument("--backend", help="only what this backend lists")
    p.add_argument(
        "--only", metavar="TEXT", help="only variants whose name, as --list prints it, contains TEXT"
    )
    p.add_argument("--jobs", type=_positive, metavar="N", help="worker processes (default: one a CPU)")
    p.add_argument("--list", action="store_true", help="print the variants' names, compile nothing")
    p.set_defaults(run=_precompile)

    p = commands.add_parser("doctor", help="versions, GPUs, cache and backends, with what should be mended")
    p.add_argument("--json", action="store_true", help="machine-readable")
    p.set_defaults(run=_doctor)

    p = commands.add_parser(
        "conformance", help="run the conformance kit on a backend; further arguments go to pytest"
    )
    p.add_argument("name", metavar="NAME", help="the backend")
    p.set_defaults(run=_conformance)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def _demo(args: argparse.Namespace, rest: list[str]) -> int:
    from kda_core import demo
    from kda_core.errors import DeviceError

    try:
        report = demo.run(args.device, args.tokens, args.backend, say=_print)
    except DeviceError as error:
        print(f"DeviceError: {error}", file=sys.stderr)
        return 2
    return 0 if report.ok else 1


def _backends(args: argparse.Namespace, rest: list[str]) -> int:
    _print(str(api.backends()))
    return 0


def _explain(args: argparse.Namespace, rest: list[str]) -> int:
    explanation = api.explain(_shape(args), backend=args.backend)
    _print(str(explanation))
    return 0 if explanation.error is None else 1


def _shape(args: argparse.Namespace) -> contract.ProblemShape:
    """A problem that no tensor stands behind, so that one machine can ask about another's GPU."""
    dtype, gate = DTYPES[args.dtype], args.gate != "precomputed"
    options = contract.KdaOptions(
        scale=args.K**-0.5,
        output_final_state=args.final_state,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=gate,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=contract.SAFE_GATE_BOUND if args.gate == "bounded" else None,
        state_v_first=args.state_v_first,
        pin=args.pin,
        needs_backward=args.backward,
    )
    arch, device_type = _arch(args.arch)
    return contract.ProblemShape(
        B=args.B, T=args.T, H=args.H, HV=args.HV or args.H, K=args.K, V=args.V, N=args.N or args.B,
        dtype=dtype, g_dtype=dtype, beta_dtype=dtype, index_dtype=torch.int32 if args.N else None,
        has_A_log=gate, has_dt_bias=gate, has_initial_state=args.initial_state,
        device_type=device_type, arch=arch, options=options,
    )  # fmt: skip


def _arch(text: str | None) -> tuple[tuple[int, int] | None, str]:
    if text is None:
        text = ".".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else "cpu"
    if text == "cpu":
        return None, "cpu"
    parts = text.split(".")
    if len(parts) != 2 or not all(p.isdigit() for p in parts):
        raise SystemExit(f"--arch: expected cpu or a compute capability such as 9.0, got {text}")
    return (int(parts[0]), int(parts[1])), "cuda"


def _precompile(args: argparse.Namespace, rest: list[str]) -> int:
    from kda_core import precompile

    return precompile.run(args.arch, args.backend, args.only, args.jobs, args.list)


def _doctor(args: argparse.Namespace, rest: list[str]) -> int:
    from kda_core import doctor

    report = doctor.examine()
    print(json.dumps(report, indent=2)) if args.json else _print(doctor.show(report))
    return 1 if report["problems"] else 0


def _conformance(args: argparse.Namespace, rest: list[str]) -> int:
    try:
        from kda_core.testing import plugin
    except ImportError as error:
        print(f"conformance needs pytest: pip install kda-core[testing] ({error})", file=sys.stderr)
        return 2
    return plugin.run(args.name, rest)


def _print(text: str) -> None:
    """Through rich where it is installed and a terminal is there to show it, else as it is."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console(highlight=True, soft_wrap=True).print(text, markup=False)
            return
    print(text, flush=True)
