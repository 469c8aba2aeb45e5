"""The emulator's exceptions survive pickling and copying. A test run over several processes needs that."""

import copy
import pickle

import pytest

from ptx_emulator.errors import ExecutionError, PtxError

ERRORS = [
    PtxError("no .target"),
    PtxError("not understood", 7, "mov.b32 a, b;"),
    ExecutionError("deadlock", "kernel"),
    ExecutionError("race", "kernel", cta=1, warp=2, line=3, text="st.shared.b32 [a], b;"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.message)
@pytest.mark.parametrize("trip", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy])
def test_errors_are_the_same_after_a_round_trip(error, trip):
    got = trip(error)
    assert type(got) is type(error)
    assert (str(got), got.args, got.__dict__) == (str(error), error.args, error.__dict__)
