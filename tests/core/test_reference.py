"""The reference backend beyond the conformance kit: dtypes, memory slabs, extreme gates, pinned packed calls."""

import pytest
import torch
from helpers.inputs import call
from torch.utils._python_dispatch import TorchDispatchMode

from kda_core import buffers, chunk_kda, contract, reference, validate


def recurrence(x, scale, lengths=None):
    """Returns o and the final states of the recurrence as a plain fp64 loop, HV == H."""
    q, k, v, g, beta = (x[n].double() for n in ("q", "k", "v", "g", "beta"))
    o, states = torch.zeros_like(v), []
    first = 0
    for n in lengths or [q.shape[1]]:
        S = torch.zeros(q.shape[2], q.shape[3], v.shape[3], dtype=torch.float64)
        for t in range(first, first + n):
            S = S * g[0, t].exp().unsqueeze(-1)
            error = v[0, t] - torch.einsum("hk,hkv->hv", k[0, t], S)
            S = S + torch.einsum("hk,hv->hkv", beta[0, t].unsqueeze(-1) * k[0, t], error)
            o[0, t] = scale * torch.einsum("hk,hkv->hv", q[0, t], S)
        states.append(S)
        first += n
    return o, torch.stack(states)


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
)
def test_dtypes(dtype, rtol):
    x = call(T=50, dtype=dtype)
    o, state = chunk_kda(**x, scale=0.5, output_final_state=True)
    want_o, want_s = recurrence(x, 0.5)
    assert o.dtype == dtype and state.dtype == (dtype if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(o.double(), want_o, rtol=rtol, atol=rtol)
    torch.testing.assert_close(state.double(), want_s, rtol=rtol, atol=rtol)


def test_states_of_fixed_lengths_are_stored_without_a_read_on_the_host():
    """So that a CUDA graph can capture the call."""

    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default, (
                "the host reads a value of a tensor"
            )
            return func(*args, **(kwargs or {}))

    x = call(T=130)
    tensors = (*x.values(), *[None] * 5)
    options = contract.KdaOptions(return_intermediate_states=True)
    inputs = buffers.make_inputs(tensors, validate.problem_shape(*tensors, options=options))
    outputs = buffers.allocate_outputs(inputs)
    with NoReads():
        reference.ReferenceBackend().chunk_fwd(inputs, outputs)
    *_, want = chunk_kda(**x, return_intermediate_states=True, output_final_state=True)
    assert torch.equal(outputs.intermediate_states, want)


def test_few_exponentials_are_taken():
    """An exponential for every pair of rows in a block of 16 would be 16 for each token and channel, most of the time of a call."""

    class Exponentials(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.exp.default:
                self.count += out.numel()
            return out

    x = call(T=256, H=2, HV=2, K=8, V=8)
    tensors = (*x.values(), *[None] * 5)
    inputs = buffers.make_inputs(tensors, validate.problem_shape(*tensors, options=contract.KdaOptions()))
    outputs = buffers.allocate_outputs(inputs)
    with Exponentials() as exponentials:
        reference.ReferenceBackend().chunk_fwd(inputs, outputs)
    assert torch.equal(outputs.o, chunk_kda(**x)[0])
    assert 0 < exponentials.count <= 8 * x["g"].numel()


@pytest.mark.parametrize("T", [1, 15, 16, 17, 40])
def test_steep_and_flat_gates_side_by_side_are_exact(T):
    """Decays from e^0 to e^-104 within one block, fp64: no exponent is above 0, and no factor of a pair underflows alone."""
    x = call(T=T, dtype=torch.float64)
    rng = torch.Generator().manual_seed(2)
    steep = torch.tensor([0.0, -1e-3, -1.0, -20.0, -104.0])
    x["g"] = steep[torch.randint(5, x["g"].shape, generator=rng)]
    o, state = chunk_kda(**x, output_final_state=True)
    want_o, want_s = recurrence(x, 8**-0.5)
    torch.testing.assert_close(o, want_o, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state, want_s, rtol=1e-12, atol=1e-13)


def test_small_slabs_change_nothing_but_memory(monkeypatch):
    x = call(B=2, T=100, dtype=torch.float64)
    whole = chunk_kda(**x, output_final_state=True)
    monkeypatch.setattr(reference, "ROWS_BYTES", 1)
    for a, b in zip(whole, chunk_kda(**x, output_final_state=True)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mask", [-1000.0, float("-inf")])
def test_masks_reset_channels_exactly(mask):
    x = call(T=60, dtype=torch.float64)
    x["g"][:, 30, :, ::2] = mask
    x["g"][:, 45] = mask
    o, state = chunk_kda(**x, output_final_state=True)
    want_o, want_s = recurrence(x, 8**-0.5)
    torch.testing.assert_close(o, want_o, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, want_s, rtol=1e-9, atol=1e-9)


def test_pinned_packed_calls_agree_with_plain_ones():
    lengths = [0, 40, 0, 3, 70, 16, 0]
    x = call(T=sum(lengths), dtype=torch.float64)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    arguments = {
        "cu_seqlens": cu,
        "output_final_state": True,
        "return_intermediate_states": True,
        "chunk_size": 32,
    }
    plain, pinned = chunk_kda(**x, **arguments), chunk_kda(**x, **arguments, pin=True)
    want_o, want_s = recurrence(x, 8**-0.5, lengths)
    for o, state, h in (plain, pinned):
        torch.testing.assert_close(o, want_o, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(state, want_s, rtol=1e-11, atol=1e-12)
        assert h.shape[1] == 2 + 1 + 3 + 1
    torch.testing.assert_close(plain[2], pinned[2])
    start = 43 + 32  # the second chunk of the sequence of 70
    x32 = {n: t[:, 43:start] for n, t in x.items()}
    torch.testing.assert_close(plain[2][0, 4], recurrence(x32, 1.0)[1][0].bfloat16(), rtol=1e-2, atol=1e-2)


def test_gradients_of_packed_sequences_do_not_cross():
    x = {n: t.double().requires_grad_() for n, t in call(T=48, dtype=torch.float64).items()}
    o, _ = chunk_kda(**x, cu_seqlens=torch.tensor([0, 20, 48]))
    o[:, 20:].sum().backward()
    assert all((t.grad[:, :20] == 0).all() and t.grad[:, 20:].abs().sum() > 0 for t in x.values())


def test_a_call_without_tokens_and_states_has_gradients():
    x = {n: t.double().requires_grad_() for n, t in call(T=0, dtype=torch.float64).items()}
    o, state = chunk_kda(**x, output_final_state=True)
    (o.sum() + state.sum()).backward()
    assert all(t.grad.shape == t.shape for t in x.values())
