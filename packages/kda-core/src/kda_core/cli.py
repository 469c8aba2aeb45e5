"""``python -m kda_core``: demo, bench, backends, explain, doctor, conformance, and what other packages add (`kda_core.extensions`).

The output is plain text; a terminal gets colours if ``rich`` is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kda_core import contract, explanation, extensions, install, validate
from kda_core.bench import cases, peers
from kda_core.errors import ArgumentError, DeviceError, KdaError
from kda_core.registry import default_arch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status: 0 for success, 1 for a finding, 2 for wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(words)
    args, rest = parser.parse_known_args(words)
    if rest and not getattr(args, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return args.run(args, rest)
    except KdaError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, DeviceError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells report it
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what is still to be flushed
        return 141  # 128 + SIGPIPE


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of a command line of these words. Other packages' subcommands are looked up only if the first word is no
    subcommand of kda-core."""
    parser = argparse.ArgumentParser("python -m kda_core", description="Kimi Delta Attention behind one API")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_own(commands)
    if not words or words[0] not in commands.choices:
        _add_extensions(commands, words[0] if words else "")
    return parser


def _add_extensions(commands: Any, wanted: str) -> None:
    """Adds the subcommands of other packages. Only the one that is wanted is imported, or all of them for the help."""
    found = extensions.find(extensions.COMMAND_GROUP)
    known = {*found, *install.COMMANDS}
    for name in sorted(known - set(commands.choices)):
        if wanted in known and wanted != name:
            commands.add_parser(name)
        elif name in found:
            _add_extension(commands, found[name])
        else:
            package = install.COMMANDS[name]
            remedy = f"{name} is a command of {package}, which is not installed: {install.command(package)}"
            _add_unusable(commands, name, f"not installed (a command of {package})", remedy)


def _add_extension(commands: Any, extension: extensions.Extension) -> None:
    try:
        command = extension.command()
    except extensions.ExtensionError as error:
        _add_unusable(commands, extension.name, "broken", str(error))
        return
    p = commands.add_parser(extension.name, help=command.help, description=command.description)
    command.add_arguments(p)
    p.set_defaults(run=lambda args, rest: command.run(args), usage_error=p.error)


def _add_unusable(commands: Any, name: str, help: str, reason: str) -> None:
    """Adds a subcommand that only says why it cannot run. It accepts any arguments, so that this is the error shown."""

    def fail(args: argparse.Namespace, rest: list[str]) -> int:
        print(reason, file=sys.stderr)
        return 1

    p = commands.add_parser(name, help=help, description=reason)
    p.set_defaults(run=fail, takes_rest=True)


_IF_DECLARED = ", if --backend declares it"


def _add_own(commands: Any) -> None:
    p = commands.add_parser(
        "demo", help="KDA prefill of a real text, in one call and in two calls, compared with the fp64 oracle"
    )
    p.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="default: cuda if there is a GPU, unless --backend is for CPUs only",
    )
    p.add_argument(
        "--tokens", type=positive, help="length of the prefill (default: 65536 on a GPU, 4096 on a CPU)"
    )
    p.add_argument("--backend", help="the backend to use; no other one is asked")
    p.set_defaults(run=_demo)

    _add_bench(commands)

    p = commands.add_parser("backends", help="all known backends with their status")
    p.set_defaults(run=_backends)

    p = commands.add_parser(
        "explain",
        help="the backend that would serve a call of a given shape, its plan, and why other backends refuse",
        description="Prints `kda_core.explain` for a call with q and k [B, T, H, K] and v [B, T, HV, V]. The machine need not "
        "have the GPU. With --backend, the defaults are what that backend declares. Exit status: 0 if the call would be "
        "served, 1 if it would fail, 2 for invalid arguments.",
    )
    p.add_argument("--B", type=positive, help="batch size (default: 1)")
    p.add_argument(
        "--T",
        type=_natural,
        help="tokens of a batch row; of a packed call, the total of all sequences (default: 8192)",
    )
    p.add_argument("--H", type=positive, default=32, help="query/key heads (default: %(default)s)")
    p.add_argument("--HV", type=positive, help="value heads (default: H)")
    p.add_argument("--K", type=positive, help=f"head dimension of q and k (default: 128{_IF_DECLARED})")
    p.add_argument("--V", type=positive, help=f"head dimension of v (default: 128{_IF_DECLARED})")
    p.add_argument(
        "--lengths", type=_lengths, metavar="L,..", help="a packed call of sequences of these lengths"
    )
    p.add_argument("--N", type=positive, help="a packed call of N sequences; the plan also needs --lengths")
    p.add_argument("--dtype", choices=DTYPES, help=f"of q, k, v, g and beta (default: bf16{_IF_DECLARED})")
    p.add_argument(
        "--arch",
        type=_arch,
        help=f"{_ARCH_FORMS} (default: the GPU of this machine, or cpu if it has none or --backend is for CPUs only)",
    )
    p.add_argument("--initial-state", action="store_true", help="the call has an initial state")
    p.add_argument("--final-state", action="store_true", help="the call returns the final state")
    p.add_argument("--state-v-first", action="store_true", help="states are [V, K]")
    p.add_argument(
        "--gate",
        choices=("precomputed", "safe", "bounded", "softplus"),
        help="precomputed: g is the log decay; safe: g is the log decay in [-5, 0] (safe_gate); bounded: the kernel computes it "
        "in [-5, 0]; softplus: the kernel computes it without a bound (default: bounded, or safe if --backend does not declare "
        "gate_in_kernel)",
    )
    p.add_argument(
        "--l2norm",
        action=argparse.BooleanOptionalAction,
        help=f"whether the kernel normalises q and k (default: yes{_IF_DECLARED})",
    )
    p.add_argument(
        "--beta-sigmoid",
        action=argparse.BooleanOptionalAction,
        help=f"whether beta is a logit, not in (0, 1) (default: yes{_IF_DECLARED})",
    )
    p.add_argument("--pin", action="store_true", help="the call is made with pin=True")
    p.add_argument("--backward", action="store_true", help="the inputs require grad")
    p.add_argument("--backend", help="the backend to use; no other one is asked")
    p.add_argument(
        "--context-parallel",
        choices=("auto", "off"),
        default="auto",
        help="whether a planner may split the call (default: %(default)s)",
    )
    p.set_defaults(run=_explain, usage_error=p.error)

    p = commands.add_parser("doctor", help="versions, GPUs, cache and backends, with the problems to fix")
    p.add_argument("--json", action="store_true", help="machine-readable")
    p.set_defaults(run=_doctor)

    p = commands.add_parser(
        "conformance", help="run the conformance kit on a backend; further arguments go to pytest"
    )
    p.add_argument("name", metavar="NAME", help="the backend")
    p.set_defaults(run=_conformance, takes_rest=True)


def _add_bench(commands: Any) -> None:
    p = commands.add_parser(
        "bench",
        help="times and errors of the backends and of installed peers on this machine, as Markdown for an issue",
        description="Measures prefill, training steps and decoding with the backends that run here, and with FLA, cuDNN frontend and "
        "FlashInfer where they are installed. Prints a Markdown report; progress goes to stderr. What fails is a row that says why. "
        "Without a GPU, measures small calls by wall clock. Exit status: 0, or 1 if a backend failed or is wrong, 2 for wrong usage.",
    )  # fmt: skip
    p.add_argument("--quick", action="store_true", help="one case of each call")
    p.add_argument("--call", nargs="+", choices=peers.CALLS, help="what to measure (default: all)")
    p.add_argument(
        "--case",
        nargs="+",
        metavar="NAME",
        help="prefill and training: B1-T8192-H16-HV64 with any numbers, or a case of kda_core.bench.cases such as varlen-mixed-H64; "
        "decode: N64-HV32-T1 with any numbers, T up to 8 (default: a selection)",
    )
    p.add_argument(
        "--gates",
        nargs="+",
        choices=(*cases.GATES, *cases.UNBOUNDED),
        help="gate families of prefill and training, see kda_core.testing.inputs (default: slow-unbounded and slow for prefill, slow "
        "for training)",
    )
    p.add_argument("--backend", nargs="+", metavar="NAME", help="backends (default: all that run here)")
    p.add_argument(
        "--peers", nargs="+", choices=(*peers.PEERS, "none"), help="peers (default: all that run here)"
    )
    p.add_argument(
        "--repeats", type=positive, default=20, help="timed repetitions of a row (default: %(default)s)"
    )
    p.add_argument("--json", type=Path, metavar="PATH", help="also write all rows to a JSON file")
    p.add_argument(
        "--plot",
        type=Path,
        metavar="PATH",
        help="also draw the times, as .svg or .png; needs matplotlib. With several calls, PATH gets the name of each",
    )
    p.set_defaults(run=_bench, usage_error=p.error)


def positive(text: str) -> int:
    """Parses an option that is a whole number of at least 1."""
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
    """Parses an option that is "cpu" or a compute capability in one of `_ARCH_FORMS`."""
    if text == "cpu":
        return text
    found = re.fullmatch(r"(\d+)\.(\d)", text) or re.fullmatch(r"sm_(\d+)(\d)[a-z]?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected {_ARCH_FORMS}, got {text}")
    return int(found[1]), int(found[2])


def _demo(args: argparse.Namespace, rest: list[str]) -> int:
    from kda_core import demo

    report = demo.run(args.device, args.tokens, args.backend, say=_print)
    return 0 if report.ok else 1


def _bench(args: argparse.Namespace, rest: list[str]) -> int:
    from kda_core.bench import command

    return command.run(args)


def _backends(args: argparse.Namespace, rest: list[str]) -> int:
    _print(str(explanation.backends()))
    return 0


def _explain(args: argparse.Namespace, rest: list[str]) -> int:
    _set_defaults(args)
    try:
        shape = _shape(args)
    except ArgumentError as error:
        return args.usage_error(str(error))  # exits
    found = explanation.explain(
        shape, backend=args.backend, context_parallel=args.context_parallel, lengths=args.lengths
    )
    _print(str(found))
    return 0 if found.error is None else 1


def _set_defaults(args: argparse.Namespace) -> None:
    """Sets the options of ``explain`` that the command line leaves out: to the features, dtypes and head dimensions that the
    named backend declares, else to those of a Kimi Linear layer on this machine's GPU or CPU."""
    spec = None
    features = frozenset(f.value for f in contract.Feature)
    dtypes: Collection[str] | None = None
    head_dims: Collection[tuple[int, int]] | None = None
    # `explain` itself reports a backend that is not installed or whose spec cannot be read
    for info in explanation.backends():
        if info.name == args.backend and info.spec is not None:
            spec = info.spec
            features, dtypes, head_dims = info.spec.features, info.spec.dtypes, info.spec.head_dims
    if args.gate is None:
        args.gate = "bounded" if contract.Feature.GATE_IN_KERNEL.value in features else "safe"
    if args.l2norm is None:
        args.l2norm = contract.Feature.QK_L2NORM.value in features
    if args.beta_sigmoid is None:
        args.beta_sigmoid = contract.Feature.BETA_SIGMOID.value in features
    if args.dtype is None:
        declared = (name for name, dtype in DTYPES.items() if dtypes and contract.dtype_name(dtype) in dtypes)
        args.dtype = next(declared, "bf16")
    pairs = [(K, V) for K, V in sorted(head_dims or ()) if args.K in (None, K) and args.V in (None, V)]
    K, V = (128, 128) if not pairs or (128, 128) in pairs else pairs[0]
    args.K, args.V = args.K or K, args.V or V
    if args.arch is None:
        args.arch = default_arch(spec)


def _shape(args: argparse.Namespace) -> contract.ProblemShape:
    """Returns the shape of the call that the options describe. Tensors of the meta device go through the checks of a real call; the
    requested device replaces theirs afterwards, so that the GPU need not be present.

    Raises:
        ArgumentError: the options describe no valid call.
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
            use_qk_l2norm_in_kernel=args.l2norm,
            use_gate_in_kernel=gate,
            use_beta_sigmoid_in_kernel=args.beta_sigmoid,
            safe_gate=args.gate == "safe",
            lower_bound=contract.SAFE_GATE_BOUND if args.gate == "bounded" else None,
            state_v_first=args.state_v_first,
            pin=args.pin,
            needs_backward=args.backward,
        ),
    )  # fmt: skip
    if args.arch == "cpu":
        return replace(shape, device_type="cpu", arch=None)
    return replace(shape, device_type="cuda", arch=args.arch)


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
    """Prints a text, with rich's colours if rich is installed and the output is a terminal. Escapes characters that the
    output's encoding lacks, such as undecodable bytes of a file name."""
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
