"""A training step with torch's tools: activation checkpointing, autocast, FSDP, and gradients of every form that reach the backward."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.inputs import call, replaced
from helpers.saving_backend import install_saving
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from kda_core import chunk_kda
from kda_core.registry import record_calls
from kda_core.testing import token_oracle

BF16 = torch.bfloat16
FORWARD, BACKWARD = ("saving", "chunk_fwd"), ("saving", "chunk_bwd")


@pytest.fixture
def saving(install):
    """A backend that offers saved states; calls that name none go to it."""
    return install_saving(install)


def ran(calls):
    return [(c.backend, c.entry) for c in calls]


class Layer(torch.nn.Module):
    """Projections around `chunk_kda`, [1, T, 16] -> [1, T, 16]."""

    def __init__(self, **options):
        super().__init__()
        self.project = torch.nn.Linear(16, 4 * 16 + 2, bias=False)
        self.A_log, self.dt_bias = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(16))
        self.options = options

    def forward(self, x):
        *tokens, beta = self.project(x).split([16, 16, 16, 16, 2], -1)
        q, k, v, g = (t.unflatten(-1, (2, 8)) for t in tokens)
        gate = {"use_gate_in_kernel": True, "A_log": self.A_log, "dt_bias": self.dt_bias}
        more = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        return x + chunk_kda(q, k, v, g, beta, **gate, **more, **self.options)[0].flatten(-2)


def layer(seed=0, dtype=BF16, **options):
    torch.manual_seed(seed)
    made = Layer(**options).to(dtype)
    return made, torch.randn(1, 70, 16, dtype=dtype)


def gradients(made, function, x):
    """Returns the output of a step and the gradients of the parameters."""
    made.zero_grad()
    y = function(x)
    y.float().square().mean().backward()
    return [y, *(p.grad.clone() for p in made.parameters())]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- activation checkpointing


@pytest.mark.parametrize("dense", [False, True], ids=["default", "disable_recompute"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpointed_layer_runs_twice_and_has_the_same_gradients(saving, reentrant, dense):
    made, x = layer(disable_recompute=dense)
    x.requires_grad_()
    want = gradients(made, made, x)
    with record_calls() as calls:
        got = gradients(made, lambda x: checkpoint(made, x, use_reentrant=reentrant), x)
    assert ran(calls) == [FORWARD, FORWARD, BACKWARD] and same(got, want)
    assert saving.given[-1][1] is not None, "the second forward saved states"
    assert saving.forwards[-2][1] is not reentrant, (
        "the first one of a reentrant checkpoint runs without gradients"
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_selective_checkpointing_keeps_the_outputs_of_the_operator(saving, compiled):
    kept = [torch.ops.kda_core.chunk_fwd.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    made, x = layer(disable_recompute=True)
    step = lambda x: checkpoint(made, x, use_reentrant=False, context_fn=contexts)
    want = gradients(made, made, x)
    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    with record_calls() as calls:
        got = gradients(made, step, x)
    assert ran(calls) == [FORWARD, BACKWARD] and same(got, want)
    assert torch.equal(saving.given[-1][2], saving.given[-2][2])


def test_saved_tensors_may_leave_the_device(saving):
    made, x = layer(disable_recompute=True)
    want = gradients(made, made, x)
    with torch.autograd.graph.save_on_cpu():
        assert same(gradients(made, made, x), want)


# ---- autocast, FSDP


def test_autocast_runs_the_backward_in_the_dtype_of_the_forward(saving):
    made, x = layer(dtype=torch.float32)
    with record_calls() as calls, torch.autocast("cpu", dtype=BF16):
        inside = gradients(made, made, x)  # the backward runs inside of the block as well
    assert ran(calls) == [FORWARD, BACKWARD]
    shape, states, *_ = saving.given[-1]
    assert (shape.dtype, shape.g_dtype, shape.beta_dtype) == (BF16, BF16, BF16) and states is not None
    with torch.autocast("cpu", dtype=BF16):
        y = made(x)
    made.zero_grad()
    y.float().square().mean().backward()
    assert same(inside, [y, *(p.grad for p in made.parameters())])
    assert all(p.grad.dtype == torch.float32 for p in made.parameters())


FSDP = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
sys.path[:0] = {path!r}
import kda_core
from test_training import Layer

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

torch.manual_seed(0)
model = torch.nn.Sequential(Layer(), Layer(disable_recompute=True))
batch = torch.randn(2, 70, 16)
alone = [p.detach().clone() for p in model.parameters()]
model.bfloat16()
total = [torch.zeros_like(p) for p in alone]
for row in batch:
    model.zero_grad()
    model(row[None].bfloat16()).float().square().mean().backward()
    total = [t + p.grad.float() / 2 for t, p in zip(total, model.parameters())]
model.float()
with torch.no_grad():
    for p, value in zip(model.parameters(), alone):
        p.copy_(value)
        p.grad = None

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for part in (*model, model):
    fully_shard(part, mesh=mesh, mp_policy=policy)
with kda_core.registry.record_calls() as calls:
    model(batch[rank : rank + 1]).float().square().mean().backward()
entries = [(c.backend, c.entry) for c in calls]
assert entries == 2 * [("reference", "chunk_fwd")] + 2 * [("reference", "chunk_bwd")], entries
for p, want in zip(model.parameters(), total):
    got = p.grad.full_tensor()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=2e-2 * want.abs().max().item())
dist.destroy_process_group()
print("agrees", flush=True)
os._exit(0)  # as in helpers.ranks
"""


def test_sharded_parameters_get_the_gradients_of_the_whole_batch(tmp_path):
    """FSDP gathers parameters in bf16 before the forward and frees them after it, on two processes."""
    script = tmp_path / "rank.py"
    script.write_text(FSDP.format(path=[str(Path(__file__).parent), *filter(None, sys.path)]))
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, rank, str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    said = [process.communicate()[0] for process in ranks]
    assert all(text.strip().endswith("agrees") for text in said), "\n".join(said)


# ---- gradients of every form that reach the backward


X = call(T=40)


def expected(grad_o, grad_state=None):
    """Returns the gradients of q, k, v, g and beta by autograd through the fp64 token loop."""
    exact = {n: t.double().requires_grad_() for n, t in X.items()}
    o, state = token_oracle(**exact)
    total = (o * grad_o.double()).sum()
    if grad_state is not None:
        total = total + (state * grad_state.double()).sum()
    return torch.autograd.grad(total, list(exact.values()))


NORMAL = torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(5))
GIVEN = {
    "expanded from one number": torch.ones(()).expand(1, 40, 2, 8),
    "expanded over tokens": NORMAL[:, :1].expand(1, 40, 2, 8),
    "transposed": NORMAL.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice that is not aligned": torch.empty(NORMAL.numel() + 1)[1:].view_as(NORMAL).copy_(NORMAL),
    "negated lazily": torch.complex(torch.zeros_like(NORMAL), -NORMAL).conj().imag,
    "zero": torch.zeros(1, 40, 2, 8),
    "zeros without memory": torch._efficientzerotensor((1, 40, 2, 8)),
    "of another dtype": NORMAL.double(),
}


@pytest.mark.parametrize("form", GIVEN)
def test_a_gradient_of_any_form_is_read_correctly(form):
    grad_o = GIVEN[form]
    x = {n: t.clone().requires_grad_() for n, t in X.items()}
    o, _ = chunk_kda(**x)
    if form == "of another dtype":  # torch refuses it at o itself, and converts it on the way
        o = o.double()
    with record_calls() as calls:
        found = torch.autograd.grad(o, list(x.values()), grad_o)
    assert ran(calls) == [("reference", "chunk_bwd")]
    for a, b in zip(found, expected(grad_o), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
        assert a.abs().sum() > 0 or "zero" in form


@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("both", [False, True], ids=["state alone", "o and state"])
def test_gradients_of_the_final_state(both, v_first):
    x = {n: t.clone().requires_grad_() for n, t in X.items()}
    o, state = chunk_kda(**x, output_final_state=True, state_v_first=v_first)
    grad = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(6))
    given = grad.mT if v_first else grad  # not contiguous as [V, K]
    outputs, grads = ([o, state], [NORMAL, given]) if both else ([state], [given])
    found = torch.autograd.grad(outputs, list(x.values()), grads, allow_unused=True)
    for name, a, b in zip(X, found, expected(NORMAL if both else 0 * NORMAL, grad), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5, msg=name)


def test_a_state_that_nobody_differentiates_changes_nothing():
    one, two = (replaced(X, v=X["v"].clone().requires_grad_()) for _ in range(2))
    chunk_kda(**one)[0].sum().backward()
    o, state = chunk_kda(**two, output_final_state=True)
    assert state.requires_grad
    (o.sum() + 0 * state.detach().sum()).backward()
    assert torch.equal(one["v"].grad, two["v"].grad)


def test_two_backwards_through_one_forward_have_the_same_bits(saving):
    x = call(T=70, dtype=BF16)
    x["k"].requires_grad_()
    o, _ = chunk_kda(**x, disable_recompute=True)
    first = torch.autograd.grad(o.float().sum(), x["k"], retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(o.float().sum(), x["k"]))
    assert torch.equal(saving.given[0][1], saving.given[1][1])
