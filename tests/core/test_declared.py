"""`BackendSpec.dtypes` and `head_dims`: core refuses what is not declared, before the backend is loaded."""

import sys

import pytest
import torch
from helpers.inputs import call

import kda_core
from kda_core import chunk_kda, explain
from kda_core.errors import BackendUnsupportedError
from kda_core.registry import record_calls

BF16, FP16 = torch.bfloat16, torch.float16


def reason(name):
    return next(i.reason for i in kda_core.backends() if i.name == name)


def inputs(dtype=BF16, K=16, V=16):
    rng = torch.Generator().manual_seed(0)
    shapes = {"q": (K,), "k": (K,), "v": (V,), "g": (K,), "beta": ()}
    x = {n: torch.rand(1, 5, 2, *s, generator=rng) for n, s in shapes.items()}
    return {n: -t if n == "g" else t if n == "beta" else t.to(dtype) for n, t in x.items()}


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (inputs(FP16), "unsupported: dtype float16; serves bfloat16, float32"),
        (inputs(K=32), "unsupported: head dimensions K=32, V=16; serves K=16, V=16, K=16, V=32"),
        (inputs(V=64), "unsupported: head dimensions K=16, V=64; serves K=16, V=16, K=16, V=32"),
    ],
    ids=["dtype", "K", "V"],
)
def test_undeclared_calls_are_refused_before_the_backend_is_loaded(install, x, words):
    install(
        "narrow",
        dtypes=frozenset({"float32", "bfloat16"}),
        head_dims=frozenset({(16, 16), (16, 32)}),
        backend="raise RuntimeError('imported')",
    )
    why = {r.name: r.reason for r in explain(**x).refusals}["narrow"]
    assert why == words and "fake_narrow_backend" not in sys.modules
    with record_calls() as calls, pytest.raises(BackendUnsupportedError, match=words.split("; ")[1]):
        chunk_kda(**x, backend="narrow")
    assert not calls


def test_declared_calls_are_served_and_others_go_to_another_backend(install):
    install("narrow", dtypes=frozenset({"bfloat16"}), head_dims=frozenset({(16, 32)}), priority=9)
    for x, served in ((inputs(V=32), "narrow"), (inputs(FP16, V=32), "reference"), (inputs(), "reference")):
        with record_calls() as calls:
            chunk_kda(**x)
        assert [c.backend for c in calls] == [served]


def test_can_run_decides_on_dtypes_and_head_dimensions_that_a_spec_leaves_out(install):
    install("open", priority=9)
    install("picky", priority=10, refuses="fp16 is slow")
    for x in (inputs(), inputs(FP16, K=32, V=8)):
        with record_calls() as calls:
            chunk_kda(**x)
        assert [c.backend for c in calls] == ["open"]
        assert "fp16 is slow" in str(explain(**x))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtypes", frozenset({"bf16"})),
        ("dtypes", frozenset()),
        ("dtypes", ("bfloat16",)),
        ("dtypes", "bfloat16"),
        ("head_dims", frozenset({128})),
        ("head_dims", frozenset()),
        ("head_dims", (128, 128)),
        ("head_dims", frozenset({(128, 0)})),
        ("head_dims", frozenset({(128, 128, 128)})),
        ("head_dims", frozenset({(128.0, 128)})),
    ],
    ids=str,
)
def test_a_spec_with_a_wrong_field_is_broken_and_the_reason_names_it(install, field, value):
    install("wrong", **{field: value}, priority=9)
    assert f"{field} is {value!r}, not a frozenset of" in reason("wrong")
    with record_calls() as calls:
        chunk_kda(**call())
    assert [c.backend for c in calls] == ["reference"]


def test_the_reference_declares_every_dtype_of_the_contract():
    spec = next(i.spec for i in kda_core.backends() if i.name == "reference")
    assert spec.dtypes == {"bfloat16", "float16", "float32", "float64"} and spec.head_dims is None
