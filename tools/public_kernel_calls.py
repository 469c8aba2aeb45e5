"""Calls of public CuTe DSL kernels that have no example of their own: each runs a kernel, and compares with torch.

`tools/public_kernels.py` runs them, each in a process of its own in which torch claims a GPU.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

#: Name -> architecture, and the call. A name starts with that of its checkout.
CALLS: dict[str, tuple[str, Callable[[Path], None]]] = {}
SM90, SM100 = "sm_90a", "sm_100a"


def call(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function under ``names``, each "<name> <architecture>"."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            words, _, arch = name.rpartition(" ")
            CALLS[f"{words} ({arch})"] = arch, function
        return function

    return register


def close(found: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Compare with a tolerance relative to the largest number that is wanted.

    Raises:
        ValueError: a number differs by more, or is NaN.
    """
    error = (found.float() - want.float()).abs().max() / want.float().abs().max()
    if not error <= tolerance:
        raise ValueError(f"the error is {error:.1e}, at most {tolerance:.1e} was expected")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return random numbers that are the same in every run."""
    return torch.randn(shape, generator=torch.default_generator.manual_seed(sum(shape))).to(dtype)


def module(folder: Path, name: str) -> Any:
    """Import a module of a checkout."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)


# ---- quack


@call("quack/rmsnorm_fwd sm_90a", "quack/rmsnorm_fwd sm_100a")
def _rmsnorm(checkouts: Path) -> None:
    x, w = normal(9, 512), normal(512, dtype=torch.float32)
    found = module(checkouts / "quack", "quack.rmsnorm").rmsnorm_fwd(x, w, eps=1e-6)
    close(found[0] if isinstance(found, tuple) else found, F.rms_norm(x.float(), (512,), w, 1e-6), 1e-2)


@call("quack/rmsnorm_bwd sm_90a", "quack/rmsnorm_bwd sm_100a")
def _rmsnorm_backward(checkouts: Path) -> None:
    x, w, dout = normal(9, 512), normal(512, dtype=torch.float32), normal(9, 512)
    rstd = x.float().square().mean(-1).add(1e-6).rsqrt()
    dx, dw, *_ = module(checkouts / "quack", "quack.rmsnorm").rmsnorm_bwd(x, w, dout, rstd)
    y, v = x.float().requires_grad_(), w.clone().requires_grad_()
    F.rms_norm(y, (512,), v, 1e-6).backward(dout.float())
    assert y.grad is not None and v.grad is not None
    close(dx, y.grad, 1e-2)
    close(dw, v.grad, 1e-2)


@call("quack/softmax_fwd sm_90a", "quack/softmax_fwd sm_100a")
def _softmax(checkouts: Path) -> None:
    x = normal(9, 1024)
    close(module(checkouts / "quack", "quack.softmax").softmax_fwd(x), x.float().softmax(-1), 1e-2)


@call("quack/softmax_bwd sm_90a")
def _softmax_backward(checkouts: Path) -> None:
    x, dy = normal(9, 1024), normal(9, 1024)
    y = x.float().softmax(-1).bfloat16()
    want = y.float() * (dy.float() - (y.float() * dy.float()).sum(-1, keepdim=True))
    close(module(checkouts / "quack", "quack.softmax").softmax_bwd(dy, y), want, 1e-2)


@call("quack/cross_entropy_fwd sm_90a", "quack/cross_entropy_fwd sm_100a")
def _cross_entropy(checkouts: Path) -> None:
    x, target = normal(9, 1024), torch.arange(9)
    found = module(checkouts / "quack", "quack.cross_entropy").cross_entropy_fwd(x, target)
    loss = found[0] if isinstance(found, tuple) else found
    close(loss, F.cross_entropy(x.float(), target, reduction="none"), 1e-3)


@call("quack/topk_fwd sm_90a")
def _topk(checkouts: Path) -> None:
    x = normal(9, 256)
    values, index = module(checkouts / "quack", "quack.topk").topk_fwd(x, 8)
    want = x.topk(8).values
    close(values, want, 0.0)
    close(x.gather(1, index.long()), want, 0.0)


@call("quack/gemm sm_90a", "quack/gemm sm_100a")
def _gemm(checkouts: Path) -> None:
    a, b, out = normal(1, 256, 128), normal(1, 128, 128), torch.zeros(1, 256, 128, dtype=torch.bfloat16)
    gemm = module(checkouts / "quack", "quack.gemm").gemm
    gemm(a, b, out, None, torch.zeros(1, dtype=torch.int32), 128, 128, 1, 1)
    close(out, a.float() @ b.float().mT, 1e-2)


@call("quack/gemm 2 CTAs sm_100a")
def _gemm_of_pairs(checkouts: Path) -> None:
    a, b, out = normal(1, 256, 128), normal(1, 128, 128), torch.zeros(1, 256, 128, dtype=torch.bfloat16)
    gemm = module(checkouts / "quack", "quack.gemm").gemm
    gemm(a, b, out, None, torch.zeros(1, dtype=torch.int32), 256, 128, 2, 1)
    close(out, a.float() @ b.float().mT, 1e-2)


# ---- FlashAttention


def attention(checkouts: Path) -> Any:
    """Import flash_attn.cute without the package around it, which needs its CUDA extension. It needs quack."""
    module(checkouts / "quack", "quack")
    package = types.ModuleType("flash_attn")
    package.__path__ = [str(checkouts / "flash-attention" / "flash_attn")]
    sys.modules.setdefault("flash_attn", package)
    return importlib.import_module("flash_attn.cute.interface")


def attend(checkouts: Path, heads: int, heads_kv: int, T: int, K: int, V: int, **options: Any) -> None:
    """Run a forward of random inputs and compare it."""
    q, k, v = normal(1, T, heads, K), normal(1, T, heads_kv, K), normal(1, T, heads_kv, V)
    found, lse = attention(checkouts)._flash_attn_fwd(q, k, v, return_lse=True, **options)[:2]
    wide = [x.float().transpose(1, 2) for x in (q, k, v)]
    wide[1:] = [x.repeat_interleave(heads // heads_kv, 1) for x in wide[1:]]
    scores = wide[0] @ wide[1].mT / K**0.5
    if options.get("causal"):
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    close(found.transpose(1, 2), scores.softmax(-1) @ wide[2], 2e-2)
    close(lse, scores.logsumexp(-1), 1e-3)


@call("flash-attention/forward sm_90a", "flash-attention/forward sm_100a")
def _attention(checkouts: Path) -> None:
    attend(checkouts, 1, 1, 256, 64, 64)


@call("flash-attention/forward causal, grouped heads sm_90a", "flash-attention/forward causal, grouped heads sm_100a")  # fmt: skip
def _causal_attention(checkouts: Path) -> None:
    attend(checkouts, 2, 1, 200, 128, 128, causal=True)


@call("flash-attention/forward head dimension 256, 2 CTAs sm_100a")
def _wide_attention(checkouts: Path) -> None:
    attend(checkouts, 1, 1, 256, 256, 256)


@call("flash-attention/backward sm_90a", "flash-attention/backward sm_100a")
def _attention_backward(checkouts: Path) -> None:
    q, k, v, do = (normal(1, 128, 1, 64) * (n + 1) / 4 for n in range(4))
    found = attention(checkouts)
    out, lse = found._flash_attn_fwd(q, k, v, return_lse=True)[:2]
    grads = found._flash_attn_bwd(q, k, v, out, do, lse)[:3]
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    x, y, z = (part.transpose(1, 2) for part in wide)
    F.scaled_dot_product_attention(x, y, z).transpose(1, 2).backward(do.float())
    for grad, part in zip(grads, wide):
        assert part.grad is not None
        close(grad, part.grad, 3e-2)


# ---- CUTLASS


def dense_gemm(
    checkouts: Path, m: int, tile: tuple[int, int], cluster: tuple[int, int], store: bool, file: str = "dense_gemm"
) -> None:  # fmt: skip
    """Run CUTLASS's class `DenseGemmKernel` for Blackwell with two CTAs for each MMA."""
    import cuda.bindings.driver as cuda
    from cutlass import Float32, cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    folder = checkouts / "cutlass/examples/python/CuTeDSL/cute/blackwell/kernel/dense_gemm"
    gemm = module(folder, file).DenseGemmKernel(Float32, True, tile, cluster, store)
    a, b, c = normal(m, 128, 1), normal(256, 128, 1), torch.zeros(m, 256, 1)
    stream = cuda.CUstream(0)
    fakes = [
        make_fake_compact_tensor(kind, x.shape, stride_order=(1, 0, 2), assumed_align=16)
        for kind, x in zip(_types(), (a, b, c))
    ]
    cute.compile(gemm, *fakes, stream)(a, b, c, stream)
    close(c[..., 0], a[..., 0].float() @ b[..., 0].float().T, 1e-5)


def _types() -> tuple[Any, ...]:
    from cutlass import BFloat16, Float32

    return BFloat16, BFloat16, Float32


@call("cutlass/dense_gemm use_2cta_instrs sm_100a")
def _dense_gemm(checkouts: Path) -> None:
    dense_gemm(checkouts, 256, (256, 128), (2, 1), False)


@call("cutlass/dense_gemm use_2cta_instrs, use_tma_store, cluster 2 x 2 sm_100a")
def _dense_gemm_stored_by_tma(checkouts: Path) -> None:
    dense_gemm(checkouts, 512, (256, 128), (2, 2), True)


@call("cutlass/dense_gemm use_2cta_instrs, M = 128 sm_100a")
def _dense_gemm_of_small_tiles(checkouts: Path) -> None:
    dense_gemm(checkouts, 128, (128, 128), (2, 1), True)


#: Name -> architecture, an example of CUTLASS's that compares its results itself (below `SCRIPTS_FOLDER`), and its arguments.
SCRIPTS: dict[str, tuple[str, str, str]] = {}
SCRIPTS_FOLDER = Path("cutlass/examples/python/CuTeDSL/cute")


def script(arch: str, path: str, *cases: str) -> None:
    """Register an example, once for each of ``cases``, its arguments."""
    for arguments in cases:
        shown = f"{arguments} " if arguments else ""
        SCRIPTS[f"cutlass/{path} {shown}({arch})"] = arch, path, arguments


BLACKWELL, HOPPER, TUTORIAL = "blackwell/kernel", "hopper/kernel", "blackwell/tutorial"
FP16 = "--mnkl 256,128,128,1 --ab_dtype Float16"
FP8 = "--mnkl 256,128,128,1 --ab_dtype Float8E4M3FN --c_dtype Float16"
PAIRS = "--use_2cta_instrs --mma_tiler_mn 256,128 --cluster_shape_mn 2,1"
ONE_TILE, TWO_GROUPS = (
    "--mnkl 128,128,128,1",
    "--num_groups 2 --problem_sizes_mnkl ((128,128,128,1),(128,128,64,1))",
)

script(SM100, f"{BLACKWELL}/dense_gemm/dense_gemm.py", FP16)
script(
    SM100, f"{BLACKWELL}/dense_gemm/dense_gemm_persistent.py",
    f"{FP16} --benchmark none", f"{FP8} --benchmark none", f"{FP16} --benchmark none --use_tma_store {PAIRS}",
)  # fmt: skip
script(
    SM100, f"{BLACKWELL}/dense_gemm/dense_gemm_alpha_beta_persistent.py",
    f"{FP16} --c_dtype Float16 --d_dtype Float16 --alpha 2 --beta 0.5",
)  # fmt: skip
script(SM100, f"{BLACKWELL}/dense_gemm/dense_gemm_persistent_dynamic.py", f"{FP16} --benchmark none")
script(SM100, f"{BLACKWELL}/dense_gemm/dense_gemm_persistent_prefetch.py", FP16)
script(SM100, f"{BLACKWELL}/dense_gemm/dense_gemm_software_pipeline.py", FP16)
script(SM100, f"{BLACKWELL}/grouped_gemm/grouped_gemm.py", TWO_GROUPS)
script(
    SM100, f"{BLACKWELL}/mixed_input_gemm/mixed_input_gemm.py",
    f"{ONE_TILE} --a_dtype Int8 --scale_granularity_m 0 --scale_granularity_k 0", ONE_TILE,
)  # fmt: skip
script(SM100, f"{BLACKWELL}/mixed_input_gemm/grouped_mixed_input_gemm.py", "--mnkl 128,128,128,2")
script(SM100, f"{BLACKWELL}/blockwise_gemm/blockwise_gemm.py", ONE_TILE)
script(SM100, f"{BLACKWELL}/blockwise_gemm/contiguous_grouped_gemm.py", "--mnkl 128,128,128,2")
script(SM100, f"{BLACKWELL}/blockwise_gemm/masked_grouped_gemm.py", "--mnkl 128,128,128,2")
script(
    SM100, f"{BLACKWELL}/blockscaled_gemm/dense_blockscaled_gemm_persistent.py", "--mnkl 128,128,256,1",
    f"{ONE_TILE} --a_dtype Float8E4M3FN --b_dtype Float8E4M3FN --sf_dtype Float8E8M0FNU --sf_vec_size 32",
)  # fmt: skip
script(SM100, f"{BLACKWELL}/blockscaled_grouped_gemm/grouped_blockscaled_gemm.py", "--num_groups 2")
script(
    SM100, f"{BLACKWELL}/moe/torch_grouped_mm.py",
    "--tokens 16 --experts 2 --top_k_select 1 --hidden 128 --intermediate 128",
)  # fmt: skip
script(SM100, f"{BLACKWELL}/rmsnorm/rmsnorm.py", "--M 4 --N 1024")
script(SM100, f"{BLACKWELL}/attention/fmha/fmha.py", "--q_shape 1,128,2,64 --k_shape 1,128,2,64")
script(SM100, f"{BLACKWELL}/attention/fmha/fmha_bwd.py", "--s_q 128 --s_k 128 --d 64 --h_q 1 --h_k 1")
script(SM100, f"{BLACKWELL}/attention/mamba2_ssd/mamba2_ssd.py", "--gbehcdln 2,2,2,2,2,64,128,128")
script(SM100, f"{BLACKWELL}/attention/mla/mla_decode_fp16.py", "--seq_len_k 128")
script(
    SM100, f"{BLACKWELL}/attention/mixed_input_fmha/mixed_input_fmha_decode.py",
    "--s 128 --h_q 8 --h_k 1 --d 256 --bs 256",
)  # fmt: skip
script(
    SM100, f"{BLACKWELL}/attention/mixed_input_fmha/mixed_input_fmha_prefill_d256.py",
    "--q_shape 1,1,128,256 --k_shape 1,1,128,256",
)  # fmt: skip
for _name in ("0", "1", "2", "3", "3_1", "4", "5"):
    script(SM100, f"{TUTORIAL}/tutorial_gemm/fp16_gemm_{_name}.py", "--mnk 256,256,128")
for _name in ("v0", "v1", "v2"):
    script(SM100, f"{TUTORIAL}/tutorial_tma/tma_{_name}.py", "--M 128 --N 128")
script(SM90, f"{HOPPER}/dense_gemm/dense_gemm.py", ONE_TILE)
script(SM90, f"{HOPPER}/dense_gemm/dense_gemm_persistent.py", ONE_TILE)
script(SM90, f"{HOPPER}/dense_gemm/dense_gemm_fp8_2xacc.py", f"{ONE_TILE} --cluster_shape_mn 1,1")
script(SM90, f"{HOPPER}/dense_gemm/dense_gemm_fp8_gelu_persistent.py", ONE_TILE)
script(SM90, f"{HOPPER}/grouped_gemm/grouped_gemm.py", TWO_GROUPS)
script(
    SM90,
    f"{HOPPER}/attention/fmha.py",
    "--q_shape 1,128,2,64 --k_shape 1,128,2,64 --mma_tile_shape_mn 64,128",
)
script(SM90, f"{HOPPER}/cta_norm/cta_norm.py", "--M 2 --N 1024")
