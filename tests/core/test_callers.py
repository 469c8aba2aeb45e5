"""Calls as other projects make them: FLA's layer and tests, cuLA, vLLM, SGLang and Hugging Face's Kimi Linear.

Each call is served and agrees with the fp64 token loop, or is refused as docs/differences-from-fla.md says.
"""

import re
import types
from pathlib import Path

import pytest
import torch

from kda_core import chunk_kda, fused_recurrent_kda
from kda_core.errors import ArgumentError, DtypeError, ShapeError, UnknownArgumentError
from kda_core.registry import record_calls
from kda_core.testing import token_oracle

PAGE = Path(__file__).parents[2] / "docs" / "differences-from-fla.md"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
T, H, K, V = 40, 2, 16, 16


def inputs(
    dtype=FP32, gate="raw", beta="logits", *, B=1, T=T, HV=H, V=V, g_dtype=None, beta_dtype=None, unit=False
):
    """Returns q, k, v, g and beta as models compute them.

    `gate`: g is "raw", the input of the gate; "decay", the log decay; or "clamped", the log decay in [-5, 0]. `beta`: "logits", or
    "ready" for values in [0, 1]. `unit`: whether q and k are normalised.
    """
    rng = torch.Generator().manual_seed(T + HV)
    normal = lambda *s: torch.randn(*s, generator=rng)
    q, k, v, g = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V), normal(B, T, HV, K)
    if unit:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    if gate != "raw":
        g = torch.nn.functional.logsigmoid(g)
    if gate == "clamped":
        g = (4 * g).clamp(-5, 0)
    b = normal(B, T, HV)
    return {
        "q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": g.to(g_dtype or dtype),
        "beta": (b if beta == "logits" else b.sigmoid()).to(beta_dtype or dtype),
    }  # fmt: skip


def gate_parameters(HV=H, shape=None, dtype=FP32):
    A_log = torch.linspace(0.1, 0.9, HV).reshape(shape or (HV,)).to(dtype)
    return {"A_log": A_log, "dt_bias": torch.linspace(-1, 1, HV * K).to(dtype)}


def states(N=1, HV=H, dtype=FP32):
    rng = torch.Generator().manual_seed(N)
    return 0.1 * torch.randn(N, HV, K, V, generator=rng).to(dtype)


def cu(*ends, dtype=torch.int64):
    return torch.tensor(ends, dtype=dtype)


IN_KERNEL = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
LAYER = IN_KERNEL | {
    "initial_state": None, "output_final_state": None, "allow_neg_eigval": False, "lower_bound": None, "state_v_first": True,
    "cu_seqlens": None,
}  # fmt: skip
CHUNK_LAYER = LAYER | {"safe_gate": False}
SAFE = {"safe_gate": True, "lower_bound": -5.0}
PACKED = {"cu_seqlens": cu(0, 15, 40)}
SERVING = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}  # the model has computed the gate
FLASH_KDA = IN_KERNEL | SAFE | {"state_v_first": True}

SERVED = {
    # FLA's layer, in training and in evaluation; the gate parameters of a cast model are bf16
    "fla layer": (chunk_kda, inputs(BF16), gate_parameters(), CHUNK_LAYER),
    "fla layer, cast": (chunk_kda, inputs(BF16), gate_parameters(dtype=BF16), CHUNK_LAYER),
    "fla layer, cache": (
        chunk_kda, inputs(BF16), gate_parameters(), CHUNK_LAYER | {"initial_state": states(), "output_final_state": True},
    ),
    "fla layer, GVA, packed, safe": (
        chunk_kda, inputs(BF16, HV=4), gate_parameters(HV=4), CHUNK_LAYER | SAFE | PACKED | {"allow_neg_eigval": True},
    ),
    "fla layer, decoding": (
        fused_recurrent_kda, inputs(BF16, T=1, B=3), gate_parameters(),
        LAYER | {"initial_state": states(3), "output_final_state": True},
    ),
    "fla layer, decoding, cast": (fused_recurrent_kda, inputs(BF16, T=7), gate_parameters(dtype=BF16), LAYER),
    "fla layer, decoding, safe": (
        fused_recurrent_kda, inputs(BF16, T=7), gate_parameters(), LAYER | {"lower_bound": -5.0},
    ),
    # FLA's tests
    "fla test, chunk": (
        chunk_kda, inputs(unit=True, gate="decay", beta="ready", B=2), {},
        {"scale": 1, "initial_state": states(2), "output_final_state": True, "use_qk_l2norm_in_kernel": False,
         "use_gate_in_kernel": False, "safe_gate": False, "lower_bound": None, "disable_recompute": True, "chunk_size": 32,
         "A_log": None, "dt_bias": None},
    ),
    "fla test, chunk, safe": (
        chunk_kda, inputs(FP16, unit=True, gate="clamped", beta="ready", g_dtype=FP32), {},
        SAFE | {"scale": 0.1, "use_gate_in_kernel": False, "disable_recompute": False, "A_log": None, "dt_bias": None},
    ),
    "fla test, beta up to 2": (
        chunk_kda, {n: x * 2 if n == "beta" else x for n, x in inputs(unit=True, gate="decay", beta="ready").items()}, {},
        {"scale": None},
    ),
    "fla test, packed": (
        chunk_kda, inputs(FP16, unit=True, beta="ready"), gate_parameters(shape=(1, 1, H, 1)),
        PACKED | {"cu_seqlens_cpu": cu(0, 15, 40), "use_gate_in_kernel": True, "safe_gate": False, "initial_state": states(2),
                  "output_final_state": True, "disable_recompute": False, "chunk_size": 64},
    ),
    "fla test, states in bf16": (
        chunk_kda, inputs(BF16, unit=True, gate="decay", beta="ready"), {},
        {"output_final_state": True, "return_intermediate_states": True, "disable_recompute": False},
    ),
    "fla test, old layout name": (
        fused_recurrent_kda, inputs(unit=True, gate="decay", beta="ready"), {}, {"transpose_state_layout": True},
    ),
    "fla test, no A_log": (
        fused_recurrent_kda, inputs(HV=4, beta="ready"), {"A_log": None, "dt_bias": gate_parameters(4)["dt_bias"]},
        {"scale": 1, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": -5.0},
    ),
    "fla test, fp64": (
        fused_recurrent_kda, inputs(FP64, beta="ready"), gate_parameters(dtype=FP64),
        {"scale": K**-0.5, "initial_state": states(dtype=FP64), "output_final_state": True, "use_qk_l2norm_in_kernel": True,
         "use_gate_in_kernel": True, "lower_bound": -5.0, "state_v_first": True},
    ),
    "fla test, flash_kda": (
        chunk_kda, inputs(BF16), gate_parameters(),
        FLASH_KDA | {"scale": K**-0.5, "initial_state": states(), "output_final_state": True},
    ),
    "fla test, captured": (
        chunk_kda, inputs(unit=True, gate="decay", beta="ready"), {},
        {"cu_seqlens": cu(0, 15, 40, 40), "use_graph": True, "max_num_seqs": 3, "cp_context": None},
    ),
    # cuLA: lower_bound with precomputed decays; beta in fp32 with bf16 q, k, v
    "cula test": (
        chunk_kda, inputs(BF16, unit=True, gate="clamped", beta="ready", g_dtype=FP32, beta_dtype=FP32), {},
        SAFE | {"A_log": None, "dt_bias": None, "initial_state": states(), "output_final_state": True,
                "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False, "disable_recompute": False},
    ),
    "cula test, packed": (
        chunk_kda, inputs(BF16, unit=True, gate="clamped", beta="ready", g_dtype=FP32), {},
        SAFE | {"cu_seqlens": cu(0, 15, 40, dtype=torch.int32), "cu_seqlens_cpu": cu(0, 15, 40, dtype=torch.int32),
                "initial_state": states(2), "output_final_state": True},
    ),
    "cula benchmark": (
        chunk_kda, inputs(BF16, beta="ready"), gate_parameters(),
        SAFE | {"scale": K**-0.5, "initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True,
                "use_gate_in_kernel": True, "cu_seqlens": None, "transpose_state_layout": True},
    ),
    # vLLM and SGLang: strided projections, int32 offsets; states gathered from a pool
    "vllm prefill": (
        chunk_kda,
        {n: x.transpose(1, 2).contiguous().transpose(1, 2) if n in "qkv" else x
         for n, x in inputs(BF16, gate="decay", beta="ready", g_dtype=FP32, beta_dtype=FP32).items()},
        {}, SERVING | {"cu_seqlens": cu(0, 15, 40, dtype=torch.int32), "initial_state": states(5)[cu(3, 1)].contiguous()},
    ),
    "sglang decoding": (
        fused_recurrent_kda, inputs(BF16, T=3, gate="decay", beta="ready", g_dtype=FP32), {},
        SERVING | {"cu_seqlens": torch.arange(4, dtype=torch.int32), "initial_state": states(5)[cu(3, 1, 4)]},
    ),
    "vllm decoding, padded": (
        fused_recurrent_kda, inputs(BF16, T=8, gate="decay", beta="ready", g_dtype=FP32), {},
        SERVING | {"cu_seqlens": torch.arange(4, dtype=torch.int32), "initial_state": states(3)},
    ),
    "hugging face": (
        chunk_kda, inputs(BF16, gate="decay", beta="ready", g_dtype=FP32, beta_dtype=FP32), {},
        SERVING | {"initial_state": None, "cu_seqlens": None},
    ),
    "hugging face, decoding": (
        fused_recurrent_kda, inputs(BF16, T=1, gate="decay", beta="ready", g_dtype=FP32, beta_dtype=FP32), {},
        SERVING | {"initial_state": states(), "cu_seqlens": None},
    ),
}  # fmt: skip
ROUNDING = {BF16: 2e-2, FP16: 4e-3, FP32: 1e-4, FP64: 1e-11}
UNKNOWN_TO_THE_ORACLE = ("disable_recompute", "cp_context", "transpose_state_layout")


def expected(x, parameters, options):
    """Returns o, the final states and, if the call asks for it, h of the token loop. Deprecated and FLA-only arguments are translated
    or dropped."""
    options = {n: o for n, o in (parameters | options).items() if n not in UNKNOWN_TO_THE_ORACLE} | {
        "state_v_first": options.get("state_v_first") or options.get("transpose_state_layout") or False,
        "output_final_state": True,
        "A_log": None if (A_log := parameters.get("A_log")) is None else A_log.flatten(),
    }
    return token_oracle(**x, **options)


def near(got, want, rtol):
    scale = want.abs().max()
    assert (got.double() - want).abs().max() <= rtol * scale, (
        f"{(got.double() - want).abs().max() / scale:.2e}"
    )


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.filterwarnings("ignore:transpose_state_layout:DeprecationWarning")
def test_calls_of_other_projects_are_served(name):
    function, x, parameters, options = SERVED[name]
    with record_calls() as calls:
        got = function(**x, **parameters, **options)
    entry = "chunk_fwd" if function is chunk_kda else "recurrent_fwd"
    assert [(c.backend, c.entry) for c in calls] == [("reference", entry)]
    want, rtol = expected(x, parameters, options), ROUNDING[x["q"].dtype]
    near(got[0], want[0], rtol)
    assert got[0].dtype == x["v"].dtype
    assert (got[1] is not None) == bool(options.get("output_final_state"))
    if got[1] is not None:
        assert got[1].dtype == (FP64 if x["q"].dtype == FP64 else FP32)
        near(got[1], want[1], rtol)
    if options.get("return_intermediate_states"):
        assert got[2].dtype == BF16
        near(got[2], want[2].unflatten(0, (1, -1)) if want[2].dim() == 4 else want[2], ROUNDING[BF16])


@pytest.mark.parametrize(
    "name", [n for n in SERVED if "return_intermediate_states" not in SERVED[n][3] and "padded" not in n]
)
@pytest.mark.filterwarnings("ignore:transpose_state_layout:DeprecationWarning")
def test_gradients_have_the_shapes_and_dtypes_of_the_inputs(name):
    """Decoding calls too: the layers of FLA and Hugging Face decode with grad mode on."""
    function, x, parameters, options = SERVED[name]
    options = options | {"output_final_state": True}
    tensors = x | {n: p for n, p in parameters.items() if p is not None}
    if isinstance(options.get("initial_state"), torch.Tensor):
        tensors["initial_state"] = options["initial_state"]
    options = {n: o for n, o in options.items() if n not in tensors}
    leaves = {n: t.detach().clone().requires_grad_() for n, t in tensors.items()}
    with record_calls() as calls:
        o, state = function(**leaves, **options)
        (o.double().square().sum() + state.double().square().sum()).backward()
    assert [(c.backend, c.entry) for c in calls] == [("reference", "chunk_fwd"), ("reference", "chunk_bwd")]

    exact = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
    split = (
        {n: exact[n] for n in x},
        {n: exact[n] for n in parameters if n in exact},
        {n: exact[n] for n in exact if n not in x},
    )
    want = expected(split[0], split[1], options | split[2])
    (want[0].square().sum() + want[1].square().sum()).backward()
    for n, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape, n
        near(leaf.grad, exact[n].grad, 3 * ROUNDING[x["q"].dtype])


@pytest.mark.parametrize("name", ["fla layer, cast", "fla layer, decoding, cast", "cula test"])
def test_calls_of_other_projects_compile_with_gradients(name):
    function, x, parameters, options = SERVED[name]
    tensors = [t.detach().clone().requires_grad_() for t in (x | parameters).values()]
    names = [*x, *parameters]

    def step(*given):
        return function(**dict(zip(names, given)), **options)[0]

    torch._dynamo.reset()
    o, want = torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors), step(*tensors)
    assert torch.equal(o, want)
    compiled, eager = (torch.autograd.grad(y.float().sum(), tensors) for y in (o, want))
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(compiled, eager))


READY = inputs(unit=True, gate="decay", beta="ready")
POOL = {"initial_state": states(5), "cu_seqlens": cu(0, 15, 40)}
REFUSED = {
    # row of the page: function, arguments that the caller adds, exception, words of its message
    "Unknown keywords": (chunk_kda, {"fastmath": True}, UnknownArgumentError, "unexpected keyword argument 'fastmath'"),
    "`head_first`": (chunk_kda, {"head_first": False}, UnknownArgumentError, "[B, T, H, ...]"),
    "`initial_state_indices`": (
        chunk_kda, POOL | {"initial_state_indices": cu(3, 1)}, UnknownArgumentError, "Did you mean 'ssm_state_indices'?",
    ),
    "`chunk_indices`": (chunk_kda, {"chunk_indices": None}, UnknownArgumentError, "Leave it out"),
    "`cp_context`": (chunk_kda, {"cp_context": types.SimpleNamespace()}, ArgumentError, "cp_context"),
    "`A_log`, `dt_bias` without `use_gate_in_kernel`": (chunk_kda, gate_parameters(), ArgumentError, "use_gate_in_kernel"),
    "`lower_bound` without `use_gate_in_kernel` or `safe_gate`": (fused_recurrent_kda, {"lower_bound": -5.0}, ArgumentError, "lower_bound"),
    "`use_graph` without `cu_seqlens`": (chunk_kda, {"use_graph": True}, ArgumentError, "use_graph"),
    "`max_num_seqs` without `use_graph`": (chunk_kda, {"max_num_seqs": 2}, ArgumentError, "max_num_seqs"),
    "Dtype of states": (fused_recurrent_kda, {"initial_state": states(dtype=BF16)}, DtypeError, "torch.float32"),
    "Dtypes of q, k, v": (chunk_kda, {"k": READY["k"].bfloat16()}, DtypeError, "k: expected torch.float32"),
    "Dtypes of g, beta": (chunk_kda, {"g": READY["g"].half()}, DtypeError, "g: expected torch.float32"),
    "Shape of beta": (
        fused_recurrent_kda, {"beta": READY["beta"].unsqueeze(-1).expand(1, T, H, V)}, ShapeError, "[B, T, HV]",
    ),
    "`cu_seqlens_cpu` that differs": (
        chunk_kda, {"cu_seqlens": cu(0, 15, 40), "cu_seqlens_cpu": cu(0, 16, 40)}, ArgumentError, "15 at 1, got 16",
    ),
    "`chunk_size`": (chunk_kda, {"chunk_size": 16}, ValueError, "`chunk_size` must be either 32 or 64"),
    "Padding of `fused_recurrent_kda` with gradients": (
        fused_recurrent_kda, {"cu_seqlens": cu(0, 15, 39), "v": READY["v"].clone().requires_grad_()},
        ArgumentError, "a last value of T=40",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_refused_calls_raise_as_the_page_says(row):
    function, more, kind, words = REFUSED[row]
    with pytest.raises(kind, match=re.escape(words)):
        function(**(READY | more))
    assert f"\n| {row} |" in PAGE.read_text()
