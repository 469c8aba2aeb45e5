"""Exceptions survive pickling, copying and the way from a worker process."""

import copy
import importlib
import multiprocessing
import pickle
import pkgutil
from concurrent.futures import ProcessPoolExecutor

import pytest

import kda_core
from kda_core import errors
from kda_core.contract import KdaOptions
from kda_core.errors import ArgumentError, KdaError


def classes(base=KdaError):
    """Returns `base` and all its subclasses in kda-core."""
    for module in pkgutil.iter_modules(kda_core.__path__, "kda_core."):
        if not module.ispkg and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, new = {base}, [base]
    while new:
        new = [c for known in new for c in known.__subclasses__() if c.__module__.startswith("kda_core")]
        found.update(new)
    return sorted(found, key=lambda c: c.__name__)


def example(kind):
    """Returns an error of a class, with its own attributes and an added one."""
    error = (
        kind("scale", "a number", "str 'x'", "Pass 1.0") if issubclass(kind, ArgumentError) else kind("why")
    )
    error.seen_by = ("a", 1)
    return error


@pytest.mark.parametrize("kind", classes(), ids=lambda c: c.__name__)
@pytest.mark.parametrize("trip", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_errors_are_the_same_after_a_round_trip(kind, trip):
    error = example(kind)
    got = trip(error)
    assert type(got) is kind and got is not error
    assert (str(got), got.args, got.__dict__) == (str(error), error.args, error.__dict__)


def test_all_protocols_and_the_attributes_of_an_argument_error():
    error = errors.DtypeError("q", "a torch.Tensor", "int 3", "Pass a tensor")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        got = pickle.loads(pickle.dumps(error, protocol))
        assert (got.argument, got.expected, got.actual, got.hint) == (
            "q",
            "a torch.Tensor",
            "int 3",
            "Pass a tensor",
        )
    assert str(error) == "q: expected a torch.Tensor, got int 3. Pass a tensor"
    assert str(ArgumentError("q", "x", "y")) == "q: expected x, got y"


def test_an_argument_error_comes_back_from_a_worker_process():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(ArgumentError, match="^chunk_size: expected 32 or 64, got 16") as caught:
            pool.submit(KdaOptions, chunk_size=16).result()
        assert caught.value.argument == "chunk_size"
        assert pool.submit(KdaOptions, chunk_size=32).result() == KdaOptions(chunk_size=32)
