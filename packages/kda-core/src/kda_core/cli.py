"""``python -m kda_core``: demo, backends, explain, precompile, doctor, conformance. Plain text; colour only with ``rich``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from kda_core import contract, explanation, validate
from kda_core.errors import ArgumentError, DeviceError, KdaError
from kda_cute import ARCHITECTURES

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
        return 2 if isinstance(error, DeviceError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # as a shell reports SIGINT
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to be flushed
        return 141  # as a shell reports SIGPIPE


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
        "explain",
        help="which backend would serve a call of a given shape, by what plan, and who refuses it",
        description="What `kda_core.explain` says of a call with q and k [B, T, H, K] and v [B, T, HV, V], whose GPU need not "
        "be here. Exit status: 0 if the call would be served, 1 if it would fail, 2 for arguments that no call can have.",
    )
    p.add_argument("--B", type=_positive, help="batch size (default: 1)")
    p.add_argument("--T", type=_natural, help="tokens a batch row, packed of all sequences (default: 8192)")
    p.add_argument("--H", type=_positive, default=32, help="query/key heads (default: %(default)s)")
    p.add_argument("--HV", type=_positive, help="value heads (default: H)")
    p.add_argument(
        "--K", type=_positive, default=128, help="head dimension of q and k (default: %(default)s)"
    )
    p.add_argument("--V", type=_positive, default=128, help="head dimension of v (default: %(default)s)")
    p.add_argument(
        "--lengths", type=_lengths, metavar="L,..", help="a packed call of sequences of these lengths"
    )
    p.add_argument(
        "--N", type=_positive, help="a packed call of N sequences; its plan is known by --lengths alone"
    )
    p.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="of q, k, v, g and beta (default: %(default)s)"
    )
    p.add_argument("--arch", type=_arch, help=f"{_ARCH_FORMS} (default: this machine's)")
    p.add_argument("--initial-state", action="store_true", help="with an initial state")
    p.add_argument("--final-state", action="store_true", help="that asks for the final state")
    p.add_argument("--state-v-first", action="store_true", help="states are [V, K]")
    p.add_argument(
        "--gate",
        choices=("precomputed", "safe", "bounded", "softplus"),
        default="bounded",
        help="g is the decay, or the decay in [-5, 0] (safe_gate), or the kernel computes it in [-5, 0] or without a bound "
        "(default: %(default)s)",
    )
    p.add_argument("--no-l2norm", action="store_true", help="q and k are normalised already")
    p.add_argument("--no-beta-sigmoid", action="store_true", help="beta is no logit")
    p.add_argument("--pin", action="store_true")
    p.add_argument("--backward", action="store_true", help="a call whose inputs require grad")
    p.add_argument("--backend", help="insist on this backend")
    p.add_argument(
        "--context-parallel",
        choices=("auto", "off"),
        default="auto",
        help="whether a planner may split it (default: %(default)s)",
    )
    p.set_defaults(run=_explain, usage_error=p.error)

    p = commands.add_parser(
        "precompile",
        help="compile the kernels of the installed backends into the cache folder, ahead of time",
        description="Compiles what the installed backends list for an architecture, in worker processes and without a "
        "GPU. The folder is that of KDA_CACHE_DIR; what is in it already is left alone. Kernels that are not listed "
        "compile when a call first needs them. Run it on a CPU like that of the machine that will use the kernels.",
    )
    p.add_argument(
        "--arch",
        type=_compiled_arch,
        required=True,
        help=f"the GPU architecture: {', '.join(ARCHITECTURES.values())}; 9.0 and sm_90 name sm_90a too",
    )
    p.add_argument("--backend", help="only what this backend lists")
    p.add_argument(
        "--only", metavar="TEXT", help="only variants whose name, as --list prints it, contains TEXT"
    )
    p.add_argument("--jobs", type=_positive, metavar="N", help="worker processes (default: the usable CPUs)")
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
    if (value := _natural(text)) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text}")
    return int(text)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(_natural(n.strip()) for n in text.split(","))


_ARCH_FORMS = "cpu, or a compute capability as 9.0, sm_90 or sm_90a"


def _arch(text: str) -> tuple[int, int] | str:
    """ "cpu" or a compute capability, from all the ways in which people write one."""
    if text == "cpu":
        return text
    found = re.fullmatch(r"(\d+)\.(\d)", text) or re.fullmatch(r"sm_(\d+)(\d)[a-z]?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected {_ARCH_FORMS}, got {text}")
    return int(found[1]), int(found[2])


def _compiled_arch(text: str) -> str:
    """The name of an architecture that kernels are compiled for."""
    arch = _arch(text)
    if isinstance(arch, str) or arch not in ARCHITECTURES:
        known = ", ".join(f"{name} ({a}.{b})" for (a, b), name in ARCHITECTURES.items())
        raise argparse.ArgumentTypeError(f"expected one of {known}, got {text}")
    return ARCHITECTURES[arch]


def _demo(args: argparse.Namespace, rest: list[str]) -> int:
    from kda_core import demo

    report = demo.run(args.device, args.tokens, args.backend, say=_print)
    return 0 if report.ok else 1


def _backends(args: argparse.Namespace, rest: list[str]) -> int:
    _print(str(explanation.backends()))
    return 0


def _explain(args: argparse.Namespace, rest: list[str]) -> int:
    try:
        shape = _shape(args)
    except ArgumentError as error:
        return args.usage_error(str(error))  # which exits
    found = explanation.explain(
        shape, backend=args.backend, context_parallel=args.context_parallel, lengths=args.lengths
    )
    _print(str(found))
    return 0 if found.error is None else 1


def _shape(args: argparse.Namespace) -> contract.ProblemShape:
    """The shape of a call, checked as the call itself would be, on tensors without memory. The device is put in
    afterwards, so that one machine can ask about another's GPU.

    Raises:
        ArgumentError: options that no call can have.
    """
    H, HV, K, V, lengths, N = args.H, args.HV or args.H, args.K, args.V, args.lengths, args.N
    packed = "--lengths" if lengths is not None else "--N" if N is not None else None
    if HV % H:
        raise ArgumentError("--HV", f"a multiple of --H {H}", str(HV))
    if packed is not None and args.B not in (None, 1):
        raise ArgumentError("--B", f"1 with {packed} (a packed call has one batch row)", str(args.B))
    if lengths is not None and N not in (None, len(lengths)):
        raise ArgumentError("--N", f"the number of --lengths, {len(lengths)}", str(N))
    if lengths is not None and args.T not in (None, sum(lengths)):
        raise ArgumentError("--T", f"the sum of --lengths, {sum(lengths)}", str(args.T))
    B, T = args.B or 1, 8192 if args.T is None else args.T
    if lengths is not None:
        T, N = sum(lengths), len(lengths)

    dtype, gate = DTYPES[args.dtype], args.gate in ("bounded", "softplus")
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    state = (N or B, HV, V, K) if args.state_v_first else (N or B, HV, K, V)
    shape = validate.problem_shape(
        empty(B, T, H, K), empty(B, T, H, K), empty(B, T, HV, V), empty(B, T, HV, K), empty(B, T, HV),
        empty(HV, dtype=wide) if gate else None,
        empty(HV, K, dtype=wide) if gate else None,
        empty(*state, dtype=wide) if args.initial_state else None,
        None if N is None else empty(N + 1, dtype=torch.int32),
        None,
        options=contract.KdaOptions(
            output_final_state=args.final_state,
            use_qk_l2norm_in_kernel=not args.no_l2norm,
            use_gate_in_kernel=gate,
            use_beta_sigmoid_in_kernel=not args.no_beta_sigmoid,
            safe_gate=args.gate == "safe",
            lower_bound=contract.SAFE_GATE_BOUND if args.gate == "bounded" else None,
            state_v_first=args.state_v_first,
            pin=args.pin,
            needs_backward=args.backward,
        ),
    )  # fmt: skip
    arch = args.arch
    if arch is None:
        arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else "cpu"
    if arch == "cpu":
        return replace(shape, device_type="cpu", arch=None)
    return replace(shape, device_type="cuda", arch=arch)


def _precompile(args: argparse.Namespace, rest: list[str]) -> int:
    from kda_cute.jit import precompile_command as precompile

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
        print(f"conformance needs pytest: pip install 'pytest>=8' ({error})", file=sys.stderr)
        return 2
    return plugin.run(args.name, rest)


def _print(text: str) -> None:
    """Through rich where it is installed and a terminal is there to show it, else as it is. What the terminal's encoding
    lacks, such as bytes of a file name, is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console(highlight=True, soft_wrap=True).print(text, markup=False)
            return
    print(text, flush=True)
