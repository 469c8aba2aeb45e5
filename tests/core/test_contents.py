"""``KDA_CHECK=1``: the values of inputs are checked before a call runs, on every device."""

import pytest
import torch
from helpers.inputs import call, replaced

import kda_core
from kda_core import chunk_kda, contents, fused_recurrent_kda
from kda_core.buffers import make_inputs
from kda_core.contract import KdaOptions
from kda_core.errors import ArgumentError
from kda_core.registry import record_calls
from kda_core.validate import problem_shape

X = call(T=20)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _checked(monkeypatch):
    monkeypatch.setenv("KDA_CHECK", "1")


def spoiled(name, value, at=(0, 5, 1)):
    t = X[name].clone()
    t[at] = value
    return {name: t}


BAD = [
    # changes, argument, words of the message
    (spoiled("q", NAN), "q", "finite values, got nan at [0, 5, 1, 0], and 7 more such values"),
    (spoiled("k", INF), "k", "finite values, got inf"),
    (spoiled("v", -INF, (0, 19, 1, 7)), "v", "finite values, got -inf at [0, 19, 1, 7]"),
    (spoiled("g", 0.25, (0, 5, 1, 3)), "g", "at most 0 (it is the log of the decay), got 0.25 at [0, 5, 1, 3]"),
    (spoiled("g", NAN), "g", "at most 0"),
    (spoiled("g", -10.0) | {"safe_gate": True}, "g", "[-5, 0] with safe_gate=True, got -10.0"),
    (spoiled("g", 0.5) | {"safe_gate": True}, "g", "[-5, 0] with safe_gate=True, got 0.5"),
    (spoiled("g", NAN) | {"use_gate_in_kernel": True, "lower_bound": -5.0}, "g", "finite values"),
    (spoiled("beta", 2.5), "beta", "[0, 2], got 2.5 at [0, 5, 1]"),
    (spoiled("beta", -0.5), "beta", "[0, 2], got -0.5"),
    (spoiled("beta", NAN) | {"use_beta_sigmoid_in_kernel": True}, "beta", "finite values"),
    ({"initial_state": torch.full((1, 2, 8, 8), NAN)}, "initial_state", "nan at [0, 0, 0, 0], and 127 more"),
    (
        {"use_gate_in_kernel": True, "A_log": torch.tensor([0.0, INF])},
        "A_log", "finite values, got inf at [1]",
    ),
    (
        {"use_gate_in_kernel": True, "lower_bound": -1.0, "dt_bias": torch.full((16,), NAN)},
        "dt_bias", "finite values",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "argument", "words"), BAD)
def test_the_error_names_the_argument_with_values_out_of_range(changes, argument, words, monkeypatch):
    x = X | changes
    v = x["v"].clone().requires_grad_()  # goes through the dispatcher
    for given in (x, x, x | {"v": v}):
        with record_calls() as calls, pytest.raises(ArgumentError) as caught:
            chunk_kda(**given)
        assert str(caught.value).startswith(f"{argument}: expected ") and words in str(caught.value)
        assert not calls, "nothing ran"
    monkeypatch.setenv("KDA_CHECK", "0")  # the same call is cached, and its values are not checked
    chunk_kda(**x)
    monkeypatch.setenv("KDA_CHECK", "1")
    with pytest.raises(ArgumentError, match=f"^{argument}"):
        chunk_kda(**x)


def test_calls_in_range_give_the_same_results(monkeypatch):
    edge = replaced(X, beta=X["beta"] * 2)
    edge["g"] = X["g"].clone()
    edge["g"][0, 3], edge["g"][0, 4] = 0.0, -INF  # a decay of 1, and one that resets the state
    packed = {"cu_seqlens": torch.tensor([0, 7, 20]), "output_final_state": True}
    calls = [
        (chunk_kda, edge), (chunk_kda, X | packed), (fused_recurrent_kda, X | packed),
        (chunk_kda, X | {"safe_gate": True, "lower_bound": -5.0}),
        (chunk_kda, X | {"safe_gate": True, "lower_bound": -8.0, "g": X["g"] - 6}),  # a weaker promise
    ]  # fmt: skip
    for function, x in calls:
        checked = function(**x)
        with monkeypatch.context() as patch:
            patch.setenv("KDA_CHECK", "0")
            plain = function(**x)
        assert all(a is b or torch.equal(a, b) for a, b in zip(checked, plain))


def test_tokens_outside_of_every_sequence_are_not_checked():
    x = {n: t.clone() for n, t in X.items()}
    for t in x.values():
        t[:, 13:] = NAN
    cu = torch.tensor([0, 7, 13])
    chunk_kda(**x, cu_seqlens=cu, use_graph=True)
    fused_recurrent_kda(**x, cu_seqlens=cu)
    x["k"][0, 12, 0, 0] = NAN
    with pytest.raises(ArgumentError, match=r"^k: expected finite values, got nan at \[0, 12, 0, 0\]"):
        chunk_kda(**x, cu_seqlens=cu, use_graph=True)


class OnDevice(torch.Tensor):
    """A tensor in host memory that reports to core that it is on a GPU."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("ends", "copied", "words"),
    [
        ([1, 20], None, "cu_seqlens: expected a first value of 0, got 1"),
        ([0, 12, 7, 20], None, "cu_seqlens: expected values that never decrease, got 12 before 7 at 1"),
        ([0, 21], None, "cu_seqlens: expected a last value of T=20, got 21"),
        ([0, 5, 19], None, "cu_seqlens: expected a last value of T=20, got 19"),
        ([0, 5, 20], [0, 6, 20], "cu_seqlens_cpu: expected the values of cu_seqlens, 5 at 1, got 6"),
        ([0, 5, 20], [0, 5, 20], None),
    ],
)
def test_offsets_on_the_device_are_checked(ends, copied, words):
    cu = torch.tensor(ends)
    host = None if copied is None else torch.tensor(copied)
    tensors = (*X.values(), None, None, None, cu, host)
    shape = problem_shape(*tensors, options=KdaOptions())
    inputs = make_inputs((*tensors[:8], cu.as_subclass(OnDevice), host), shape)
    assert inputs.sequence_lengths() is None or copied is not None, "no other check reads them"
    if words is None:
        contents.check_contents(inputs)
    else:
        with pytest.raises(ArgumentError) as caught:
            contents.check_contents(inputs)
        assert str(caught.value).startswith(words)


def test_values_are_not_read_without_the_variable(monkeypatch):
    monkeypatch.delenv("KDA_CHECK")
    monkeypatch.setattr(contents, "check_contents", lambda inputs: pytest.fail("called without KDA_CHECK=1"))
    kda_core.backends(refresh=True)
    chunk_kda(**X)
    monkeypatch.setenv("KDA_CHECK", "maybe")
    with pytest.raises(ArgumentError, match="^KDA_CHECK: expected 1/true/yes/on"):
        chunk_kda(**X)
    monkeypatch.setenv("KDA_CHECK", "0")
    chunk_kda(**X)


def test_values_are_not_read_while_a_graph_is_captured(monkeypatch):
    tensors = (*(X | spoiled("q", NAN)).values(), *[None] * 5)
    inputs = make_inputs(tensors, problem_shape(*tensors, options=KdaOptions()))
    with pytest.raises(ArgumentError, match="^q: "):
        contents.check_contents(inputs)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ArgumentError, match="^q: "):  # CPU tensors are never captured
        contents.check_contents(inputs)
    monkeypatch.setattr(OnDevice, "is_cuda", True, raising=False)
    object.__setattr__(inputs, "q", inputs.q.as_subclass(OnDevice))
    contents.check_contents(inputs)


def test_compiled_calls_are_checked():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: chunk_kda(*x)[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*X.values()), chunk_kda(**X)[0])
    with pytest.raises(ArgumentError, match="^beta: "):
        compiled(*(X | spoiled("beta", 3.0)).values())


def test_a_changed_variable_takes_effect_in_the_next_call(monkeypatch):
    """A call that was resolved without the check is resolved again with it, and the other way round."""
    broken = X | spoiled("beta", 3.0)
    for on in (True, False, True):
        monkeypatch.setenv("KDA_CHECK", str(int(on)))
        if on:
            with pytest.raises(ArgumentError, match="^beta: "):
                chunk_kda(**broken)
        else:
            chunk_kda(**broken)
