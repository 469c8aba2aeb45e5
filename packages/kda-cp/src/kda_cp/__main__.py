"""The command line, ``python -m kda_cp``: calibrate, constants, plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kda_core import validate
from kda_core.contract import KdaOptions
from kda_core.errors import KdaError
from kda_core.registry import REGISTRY
from kda_cp import constants
from kda_cp.arguments import non_negative_ints, positive_int
from kda_cp.choose import make_plan

DTYPES = ("bfloat16", "float16", "float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0, or 1 after an error message."""
    parser = argparse.ArgumentParser("python -m kda_cp", description="Context parallelism for KDA")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    p = commands.add_parser("calibrate", help="time a backend on a GPU of this host and store its constants")
    p.add_argument("--backend", required=True, help="backend to time")
    p.add_argument(
        "--dtype", default="bfloat16", choices=DTYPES, help="dtype of q, k, v (default: %(default)s)"
    )
    p.add_argument("--device", type=int, default=0, help="index of the CUDA device (default: %(default)s)")
    p.set_defaults(handler=_calibrate)
    p = commands.add_parser("constants", help="print the stored and the shipped constants")
    p.set_defaults(handler=_constants)
    p = commands.add_parser(
        "plan", help="print the plan of a call, from stored or shipped constants; needs no GPU"
    )
    p.add_argument("lengths", type=int, nargs="+", help="tokens of each sequence")
    p.add_argument("--HV", type=int, required=True, help="number of value heads")
    p.add_argument("--device", default="NVIDIA H200", help="name of the GPU (default: %(default)s)")
    p.add_argument("--backend", default="sm90", help="an installed backend (default: %(default)s)")
    p.add_argument(
        "--dtype", default="bfloat16", choices=DTYPES, help="dtype of q, k, v (default: %(default)s)"
    )
    p.add_argument(
        "--SMs", type=int, default=132, help="SMs of a GPU without constants (default: %(default)s)"
    )
    p.set_defaults(handler=_plan)
    args = parser.parse_args(argv)
    try:
        args.handler(args)
    except KdaError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _calibrate(args: argparse.Namespace) -> None:
    import torch

    from kda_cp import calibrate

    device = torch.device("cuda", args.device) if torch.cuda.is_available() else torch.device("cpu")
    found = calibrate.measure(device, args.backend, getattr(torch, args.dtype))
    key = (torch.cuda.get_device_name(device), args.backend, args.dtype)
    print(f"{' / '.join(key)}: {found}\nstored in {constants.store(key, found)}")


def _constants(args: argparse.Namespace) -> None:
    for key in sorted({*constants.stored(), *constants.SHIPPED}):
        found, source = constants.lookup(key)
        print(f"{' / '.join(key)} ({source}): {found}")


def _plan(args: argparse.Namespace) -> None:
    import torch

    from kda_cp.planner import may_have_whole_ends, native_options

    HV, lengths = positive_int("HV", args.HV), non_negative_ints("lengths", args.lengths)
    x = torch.empty(1, sum(lengths), HV, 128, dtype=getattr(torch, args.dtype), device="meta")
    shape = validate.problem_shape(x, x, x, x, x[..., 0], options=KdaOptions())
    backend = REGISTRY.load(REGISTRY.find(args.backend).spec)
    options = native_options(shape, backend)
    ends = may_have_whole_ends(shape, backend)
    found, source = constants.lookup((args.device, args.backend, args.dtype))
    print(make_plan(lengths, HV=HV, constants=found, source=source, SMs=args.SMs, whole_ends=ends, **options))


if __name__ == "__main__":
    sys.exit(main())
