"""Measures errors at the numerical limit of the chunked algorithm: all keys of a head are equal, and nothing decays.

    python benchmarks/repeated_keys.py                           # the reference, on any machine
    python benchmarks/repeated_keys.py --impl sm90 fla reference # on a Hopper GPU, with FLA installed

Prints, for each length and beta, the largest relative Frobenius error over heads of o and of the final state, against the
fp64 token loop. "random" is sigmoid(N(0,1)). docs/contract.md shows such a table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the folder of the package, not of this script

from kda_core.bench import implementations, peers
from kda_core.testing import error, token_oracle

BETAS = (None, 1.0, 1.5, 1.9, 2.0)
D = 128


def main(argv: list[str] | None = None) -> int:
    """Measures the selection and prints the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--impl", nargs="+", default=["reference"], help='backends by name, or "fla" (default: reference)'
    )
    p.add_argument("--T", type=int, nargs="+", default=[64, 2048], help="lengths (default: 64 2048)")
    p.add_argument("--H", type=int, default=4, help="heads (default: 4)")
    args = p.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [f"{name} {what}" for name in args.impl for what in ("o", "state")]
    print(f"{'T':>6} {'beta':>7}" + "".join(f"{name:>18}" for name in names))
    for T in args.T:
        for beta in BETAS:
            x = arguments(T, args.H, beta, device)
            want = token_oracle(**x)
            errors: list[float] = []
            for name in args.impl:
                call = peers.fla() if name == "fla" else implementations.backend(name)
                given = {n: v for n, v in x.items() if name != "fla" or n != "safe_gate"}
                o, state = call(**given, output_final_state=True)
                errors += [error(o, want[0]), error(state, want[1], state=True)]
            shown = "random" if beta is None else f"{beta:.1f}"
            print(f"{T:>6} {shown:>7}" + "".join(f"{e:>18.2e}" for e in errors), flush=True)
    return 0


def arguments(T: int, H: int, beta: float | None, device: torch.device) -> dict[str, Any]:
    """Returns the arguments of a call with one key per head, g = 0, and `beta`; None stands for sigmoid(N(0,1))."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).bfloat16().to(device)

    x: dict[str, Any] = {
        "q": normal(1, T, H, D),
        "k": normal(1, 1, H, D).expand(1, T, H, D).contiguous(),
        "v": normal(1, T, H, D),
        "g": torch.zeros(1, T, H, D, device=device),
        "use_qk_l2norm_in_kernel": True,
        "safe_gate": True,
    }
    if beta is None:
        return x | {"beta": normal(1, T, H), "use_beta_sigmoid_in_kernel": True}
    return x | {"beta": torch.full((1, T, H), beta, device=device)}


if __name__ == "__main__":
    sys.exit(main())
