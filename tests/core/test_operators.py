"""The operators: torch.compile, opcheck, gradients, out= and workspace=, on the reference backend."""

import pytest
import torch
from helpers.inputs import call

import kda_core
from kda_core import chunk_kda, fused_recurrent_kda
from kda_core.arguments import Arguments, checked
from kda_core.errors import KdaError
from kda_core.registry import record_calls

GATED = {
    "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def assert_ran(calls, *entries):
    assert [(c.backend, c.entry, c.device_type) for c in calls] == [("reference", e, "cpu") for e in entries]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_first_call_of_a_process_compiles_with_fullgraph(tmp_path):
    import subprocess
    import sys

    script = tmp_path / "first_call.py"
    script.write_text(
        "import torch, kda_core\n"
        "x = [torch.randn(1, 20, 2, 8) / 8 for _ in range(3)] + [-torch.rand(1, 20, 2, 8), torch.rand(1, 20, 2)]\n"
        "f = torch.compile(lambda *a: kda_core.chunk_kda(*a, output_final_state=True), fullgraph=True, backend='aot_eager')\n"
        "a, b = f(*x), kda_core.chunk_kda(*x, output_final_state=True)\n"
        "assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])\n"
        "print('same')\n"
    )
    done = subprocess.run([sys.executable, str(script)], check=False, capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr


def test_compiled_forward_and_backward_return_the_bits_of_eager_mode():
    plain, compiled = call(HV=4, T=37), call(HV=4, T=37)
    f = torch.compile(
        lambda **x: chunk_kda(**x, output_final_state=True), fullgraph=True, backend="aot_eager"
    )
    results = []
    eager = lambda **x: chunk_kda(**x, output_final_state=True)
    for x, function in ((plain, eager), (compiled, f)):
        for t in x.values():
            t.requires_grad_()
        with record_calls() as calls:
            o, state = function(**x)
            (o.square().sum() + state.sum()).backward()
        assert_ran(calls, "chunk_fwd", "chunk_bwd")
        results.append([o, state, *(t.grad for t in x.values())])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_compiled_with_dynamic_lengths_compiles_once():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    f = torch.compile(lambda **x: chunk_kda(**x), fullgraph=True, backend=counter, dynamic=True)
    for T in (17, 33, 70):
        x = call(T=T)
        assert torch.equal(f(**x)[0], chunk_kda(**x)[0])
    assert counter.frame_count == 1


def test_compiled_intermediate_states_of_packed_sequences():
    x, cu = call(T=150), torch.tensor([0, 10, 10, 150])
    f = torch.compile(
        lambda cu, **x: chunk_kda(**x, cu_seqlens=cu, return_intermediate_states=True),
        fullgraph=True,
        backend="aot_eager",
    )
    compiled, eager = f(cu, **x), chunk_kda(**x, cu_seqlens=cu, return_intermediate_states=True)
    assert compiled[2].shape == (1, 1 + 0 + 3, 2, 8, 8)
    assert torch.equal(compiled[2], eager[2])


def test_errors_in_a_trace_name_the_argument():
    x = call() | {"beta": torch.rand(1, 20, 3)}
    with pytest.raises(Exception, match="beta: expected") as caught:
        torch.compile(lambda **x: chunk_kda(**x), fullgraph=True, backend="aot_eager")(**x)
    assert caught.value is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.15's own
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
def test_opcheck(grad, packed):
    x = {n: t.requires_grad_(grad) for n, t in call().items()}
    cu = torch.tensor([0, 3, 20]) if packed else None
    args = checked(Arguments(**x, cu_seqlens=cu, output_final_state=True, context_parallel="off"))
    results = torch.library.opcheck(torch.ops.kda_core.chunk_fwd.default, tuple(args))
    assert set(results.values()) == {"SUCCESS"}


def test_opcheck_of_chunk_fwd_out():
    args = checked(Arguments(**call(), context_parallel="off"))
    out = (torch.zeros(1, 20, 2, 8), None, None, None)
    results = torch.library.opcheck(torch.ops.kda_core.chunk_fwd_out.default, (*args, *out))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gradients_in_fp64(lower_bound):
    B, T, H, HV, K, V = 1, 19, 1, 2, 3, 2
    rng = torch.Generator().manual_seed(1)
    make = lambda *s: torch.randn(*s, dtype=torch.float64, generator=rng).requires_grad_()
    x = (
        make(B, T, H, K), make(B, T, H, K), make(B, T, HV, V), make(B, T, HV, K), make(B, T, HV),
        make(HV), make(HV * K), make(3, HV, V, K),
    )  # fmt: skip

    def f(q, k, v, g, beta, A_log, dt_bias, state):
        return chunk_kda(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=state, lower_bound=lower_bound,
            state_v_first=True, cu_seqlens=torch.tensor([0, 2, 2, 19]), **GATED,
        )  # fmt: skip

    with record_calls() as calls:
        assert torch.autograd.gradcheck(f, x, atol=1e-7)
    assert {c.backend for c in calls} == {"reference"}


def test_only_inputs_that_require_grad_get_gradients():
    x = call()
    x["v"].requires_grad_()
    o, _ = chunk_kda(**x)
    o.sum().backward()
    assert x["v"].grad.abs().sum() > 0 and x["q"].grad is None


def test_final_state_alone_has_gradients():
    x = call()
    x["k"].requires_grad_()
    _, state = chunk_kda(**x, output_final_state=True)
    state.sum().backward()
    assert torch.isfinite(x["k"].grad).all() and x["k"].grad.abs().sum() > 0


def test_autocast_does_not_lower_the_precision():
    x = call()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = chunk_kda(**x)[0]
    assert torch.equal(inside, chunk_kda(**x)[0])


def test_out_is_written_and_returned():
    x = call(K=8, V=4)
    o, state, h = (torch.full(s, float("nan")) for s in ((1, 20, 2, 4), (1, 2, 8, 4), (1, 1, 2, 8, 4)))
    h = h.bfloat16()
    with record_calls() as calls:
        got = chunk_kda(**x, output_final_state=True, return_intermediate_states=True, out=(o, state, h))
    assert_ran(calls, "chunk_fwd")
    want = chunk_kda(**x, output_final_state=True, return_intermediate_states=True)
    for a, b, given in zip(got, want, (o, state, h)):
        assert a is given and torch.equal(a, b)


def test_written_tensors_get_a_new_version():
    x = call()
    o, state, scratch = torch.empty(1, 20, 2, 8), torch.empty(1, 2, 8, 8), torch.empty(64, dtype=torch.uint8)
    weight = torch.ones(8, requires_grad=True)
    product = (o * weight).sum()  # autograd saves o
    before = [t._version for t in (o, state, scratch)]
    chunk_kda(**x, output_final_state=True, out=(o, state), workspace=scratch)
    assert all(t._version > v for t, v in zip((o, state, scratch), before))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    version = o._version
    with torch.inference_mode():  # tensors that are created here have no version
        chunk_kda(**x, out=torch.empty_like(o))
        chunk_kda(**x, out=o)
    assert o._version > version


@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference-mode"])
def test_the_flop_counter_counts_the_products_of_the_recurrence(inference):
    from torch.utils.flop_counter import FlopCounterMode

    x = call(B=2, T=20, H=2, HV=4, K=8, V=16)
    forward = 6 * (2 * 20 * 4) * 8 * 16
    with torch.inference_mode(inference), record_calls() as calls:
        chunk_kda(**x)
        with FlopCounterMode(display=False) as counter:
            chunk_kda(**x)
        assert counter.get_total_flops() == forward
        with FlopCounterMode(display=False) as counter:
            chunk_kda(**x, out=torch.empty_like(x["v"]))
            fused_recurrent_kda(**x)
        assert counter.get_total_flops() == 2 * forward
    assert_ran(calls, "chunk_fwd", "chunk_fwd", "chunk_fwd", "recurrent_fwd")


def test_the_flop_counter_counts_the_backward_twice():
    from torch.utils.flop_counter import FlopCounterMode

    x = call()
    forward = 6 * (20 * 2) * 8 * 8
    x["k"].requires_grad_()
    with FlopCounterMode(display=False) as counter:
        chunk_kda(**x)[0].sum().backward()
    assert counter.get_total_flops() == 3 * forward
    o, _ = chunk_kda(**x)
    with FlopCounterMode(display=False) as counter:
        o.sum().backward()
    assert counter.get_total_flops() == 2 * forward


def test_a_counter_that_was_made_before_kda_core_was_imported_counts(tmp_path):
    import subprocess
    import sys

    script = tmp_path / "counter.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "x = [torch.randn(1, 20, 2, 8) / 8 for _ in range(3)] + [-torch.rand(1, 20, 2, 8), torch.rand(1, 20, 2)]\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    import kda_core\n"
        "    kda_core.chunk_kda(*x)\n"
        "print(counter.get_total_flops())\n"
    )
    done = subprocess.run([sys.executable, str(script)], check=False, capture_output=True, text=True)
    assert done.stdout.strip() == str(6 * 20 * 2 * 8 * 8), done.stderr


def test_out_may_be_partial():
    x = call()
    state = torch.empty(1, 2, 8, 8)
    o, got = chunk_kda(**x, output_final_state=True, out=(None, state))
    assert got is state and torch.equal(o, chunk_kda(**x)[0])


def test_a_workspace_that_is_not_needed_is_not_written():
    scratch = torch.arange(64, dtype=torch.uint8)
    assert torch.equal(chunk_kda(**call(), workspace=scratch)[0], chunk_kda(**call())[0])
    assert torch.equal(scratch, torch.arange(64, dtype=torch.uint8))


def test_strided_inputs_are_read_correctly():
    x = call(T=20)
    wide = {n: torch.full((*t.shape[:-1], t.shape[-1] * 2), float("nan")) for n, t in x.items()}
    for n, t in x.items():
        wide[n][..., ::2] = t
    strided = {n: wide[n][..., ::2] for n in x}
    assert not strided["q"].is_contiguous()
    assert torch.equal(chunk_kda(**strided)[0], chunk_kda(**x)[0])


def test_recurrent_equals_chunked():
    x = call(T=33, HV=4)
    cu = torch.tensor([0, 1, 1, 33])
    state = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    arguments = {"cu_seqlens": cu, "initial_state": state, "output_final_state": True}
    with record_calls() as calls:
        a, b = fused_recurrent_kda(**x, **arguments), chunk_kda(**x, **arguments)
    assert_ran(calls, "recurrent_fwd", "chunk_fwd")
    torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a[1], b[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(a[1][1], state[1])


def test_tokens_outside_of_every_sequence_are_not_written_with_use_graph():
    x, out = call(T=20), torch.full((1, 20, 2, 8), 7.0)
    chunk_kda(**x, cu_seqlens=torch.tensor([0, 5, 12, 12]), use_graph=True, max_num_seqs=3, out=out)
    assert (out[:, 12:] == 7).all() and not (out[:, :12] == 7).any()


def test_explain_describes_the_call_and_launches_nothing():
    x = call()
    with record_calls() as calls:
        e = kda_core.explain(**x, output_final_state=True, cu_seqlens=torch.tensor([0, 20]))
    assert not calls
    assert (e.backend, e.rule, e.plan, e.error) == ("reference", "automatic", "direct", None)
    assert "needs     final_state, unbounded_gate, varlen" in str(e)
    with pytest.raises(KdaError, match="beta: expected"):
        kda_core.explain(**(x | {"beta": x["v"]}))
