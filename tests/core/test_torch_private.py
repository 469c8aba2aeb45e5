"""Calls without the private names of torch that let a call skip the dispatcher."""

from types import SimpleNamespace

import pytest
import torch
from helpers.inputs import call

from kda_core import chunk_kda, ops, torch_private

NAMES = ("_len_torch_dispatch_stack", "_is_torch_function_mode_enabled", "_get_tracing_state", "_functorch")
X = call()


def torch_without(name):
    """Returns a stand-in for torch's extension module that lacks one name."""
    return SimpleNamespace(**{n: getattr(torch._C, n) for n in NAMES if n != name})


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_name_is_detected(name):
    assert torch_private.probe(torch_without("")) is not None
    assert torch_private.probe(torch_without(name)) is None


def test_functorch_may_lack_its_stack():
    found = torch_without("_functorch")
    found._functorch = SimpleNamespace()
    assert torch_private.probe(found) is None


def test_guards_may_be_missing():
    assert torch_private.probe_guards(torch._C) is not None
    for found in (SimpleNamespace(), SimpleNamespace(_dynamo=SimpleNamespace(guards=SimpleNamespace()))):
        assert torch_private.probe_guards(found) is None


def test_allocators_may_be_missing(monkeypatch):
    assert set(torch_private.probe_allocators(torch._C)) == {"cpu", "cuda"}
    for found in (SimpleNamespace(), SimpleNamespace(_dynamo=SimpleNamespace(guards=SimpleNamespace()))):
        assert torch_private.probe_allocators(found) == {}
    for allocators in (torch_private.ALLOCATORS, {}):
        monkeypatch.setattr(torch_private, "ALLOCATORS", allocators)
        for size in ((2, 3, 1, 5), (0, 4), (7,)):
            new = torch_private.allocator(size, torch.bfloat16, "cpu")
            a, b = new(), new()
            assert (
                a.shape == size and a.is_contiguous() and a.dtype == torch.bfloat16 and a.device.type == "cpu"
            )
            assert a.stride() == torch.empty(size).stride() and not a.requires_grad
            assert a.numel() == 0 or a.data_ptr() != b.data_ptr()
        with torch.inference_mode():
            assert new().is_inference()
        assert not new().is_inference()


def test_calls_without_these_names_go_through_the_dispatcher(monkeypatch):
    x = call()
    x["v"].requires_grad_()
    want, _ = chunk_kda(**X)
    chunk_kda(**x)[0].sum().backward()
    gradient, x["v"].grad = x["v"].grad, None

    direct = []
    run_directly = ops.run_directly
    monkeypatch.setattr(ops, "run_directly", lambda *a: direct.append(1) or run_directly(*a))
    chunk_kda(**X)
    assert len(direct) == 1
    monkeypatch.setattr(torch_private, "STATE", torch_private.probe(torch_without("_get_tracing_state")))
    got, _ = chunk_kda(**X)
    assert torch.equal(got, want) and len(direct) == 1
    out = torch.empty_like(want)
    assert chunk_kda(**X, out=out)[0] is out and torch.equal(out, want)
    chunk_kda(**x)[0].sum().backward()
    assert torch.equal(x["v"].grad, gradient)
    batch = [torch.stack([t, t]) for t in X.values()]
    assert torch.equal(torch.func.vmap(lambda *t: chunk_kda(*t)[0])(*batch), torch.stack([want, want]))
    assert len(direct) == 1
