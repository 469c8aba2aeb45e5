"""Small kernels for the tests: a PTX body between common declarations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

import ptx_emulator

#: Executes PTX: the emulator, or `gpu.run` while fixtures are recorded.
execute: Callable[..., int] = ptx_emulator.run

#: Target of the texts. The emulator ignores it.
target = "sm_90a"

#: Machine code that the DSL compiled, by PTX text. A GPU executes it instead of the output of its driver's assembler, which is of
#: another version. None on the emulator, which needs no machine code.
images: dict[str, bytes] | None = None

DECLARATIONS = """
    .reg .pred %p<32>; .reg .b16 %h<32>; .reg .b32 %r<512>; .reg .b64 %q<64>; .reg .f32 %f<32>; .reg .f64 %e<8>;
"""


def kernel(body: str, parameters: int = 2) -> str:
    """A kernel whose parameters p0, p1, ... are addresses. %q0, %q1, ... hold them; %r0 holds %tid.x."""
    names = [f"p{n}" for n in range(parameters)]
    loads = "\n".join(f"ld.param.u64 %q{n}, [{name}];" for n, name in enumerate(names))
    head = ", ".join(f".param .u64 {name}" for name in names)
    return f"""
.version 9.0
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 shared_bytes[];
.visible .entry test({head})
{{
{DECLARATIONS}
{loads}
mov.u32 %r0, %tid.x;
{body}
ret;
}}
"""


def run(
    body: str,
    *tensors: torch.Tensor,
    threads: int = 32,
    grid: int | tuple[int, ...] = 1,
    shared: int = 0,
    seed: int = 0,
    **options,
):
    """Execute a body whose parameters are the addresses of ``tensors``. Returns the number of executed instructions."""
    return execute(
        kernel(body, len(tensors)),
        grid if isinstance(grid, tuple) else (grid,),
        (threads,),
        shared,
        tensors,
        seed=seed,
        **options,
    )


def lanewise(instruction: str, result: str, *operands: np.ndarray) -> np.ndarray:
    """Execute an instruction with operands {0}, {1}, ... and result {d}. Each thread takes one element of the operands, whose
    length is a multiple of 32 and at most 1024. ``result``: a PTX type. Returns the results as unsigned integers of its size."""
    prefix = {"pred": "%p", "b16": "%h", "b32": "%r", "b64": "%q", "f32": "%f", "f64": "%e"}
    sizes = {"b16": 2, "b32": 4, "b64": 8, "f32": 4, "f64": 8}
    kinds = {2: "b16", 4: "b32", 8: "b64"}
    body = "cvt.u64.u32 %q40, %r0;\n"
    names = []
    for n, x in enumerate(operands):
        kind = kinds[x.dtype.itemsize]
        # fp64 operands need registers of type f64.
        names.append(f"%e{1 + n}" if x.dtype == np.float64 else f"{prefix[kind]}{10 + n}")
        body += f"mad.lo.s64 %q41, %q40, {x.dtype.itemsize}, %q{n};\nld.global.{kind} {names[-1]}, [%q41];\n"
    d = "%e7" if result == "f64" else f"{prefix[result]}{20}"
    body += instruction.format(*names, d=d) + "\n"
    if result == "pred":
        body += "selp.b32 %r20, 1, 0, %p20;\n"
        result, d = "b32", "%r20"
    body += f"mad.lo.s64 %q41, %q40, {sizes[result]}, %q{len(operands)};\nst.global.{result} [%q41], {d};\n"
    signed = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensors = [
        torch.from_numpy(np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}").copy()) for x in operands
    ]
    count = len(operands[0])
    out = torch.zeros(count, dtype=signed[sizes[result]])
    run(body, *tensors, out, threads=count)
    return out.numpy().view(f"u{sizes[result]}")
