"""The host passes the kernel's arguments in the order of their definition."""

import torch
from helpers.support import problem_shape

from kda_core.contract import KdaInputs, KdaOutputs
from kda_sm90.arguments import PrefillArguments, ShapeArguments
from kda_sm90.launch import Launch

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
OUTPUTS = ("o", "final_state", "intermediate_states", "workspace", "residual")
OPTIONAL = (
    "A_log",
    "dt_bias",
    "initial_state",
    "cu_seqlens",
    "final_state",
    "intermediate_states",
    "residual",
)

#: Names of the kernel's arguments where they differ from those of the contract.
KERNEL_NAMES = {"A_log": "a_log", "cu_seqlens": "offsets", "intermediate_states": "states"}


def passed_by(transitions, absent):
    """Returns the arguments that a launch passes, by name, and the tensors of the call.

    ``absent``: names of tensors that are None.
    """
    tensors = {name: None if name in absent else torch.zeros(3, 5, 2, 1, 1) for name in INPUTS + OUTPUTS}
    inputs = {name: tensors[name] for name in INPUTS} | {"cu_seqlens_cpu": None}
    outputs = KdaOutputs(**{name: tensors[name] for name in OUTPUTS})
    passed = []
    launch = Launch(lambda *values: passed.extend(values), ShapeArguments(*range(16)))
    launch(KdaInputs(**inputs, shape=problem_shape((9, 0))), outputs, transitions)
    assert passed[0] is tensors["o"]  # it names the device and the stream
    return dict(zip(PrefillArguments._fields, passed[1:], strict=True)), tensors


def test_every_tensor_is_passed_by_its_name():
    transitions = torch.zeros(1)
    values, tensors = passed_by(transitions, ())
    for name, tensor in tensors.items():
        assert values[KERNEL_NAMES.get(name, name)] == tensor.data_ptr(), name
    assert values["transitions"] == transitions.data_ptr() and values["state_count"] == 15
    assert [values[name] for name in ShapeArguments._fields] == list(range(16))


def test_saved_states_take_the_place_of_intermediate_states():
    saved, passed = torch.zeros(7, 2, 1, 1), []
    inputs = dict.fromkeys((*INPUTS, "cu_seqlens_cpu")) | {"q": torch.zeros(1)}
    launch = Launch(lambda *values: passed.extend(values), ShapeArguments(*range(16)))
    launch(KdaInputs(**inputs, shape=problem_shape((9, 0))), KdaOutputs(inputs["q"], saved_states=saved))
    values = dict(zip(PrefillArguments._fields, passed[1:], strict=True))
    assert values["states"] == saved.data_ptr() and values["state_count"] == 7


def test_absent_tensors_are_passed_as_0():
    values, _ = passed_by(None, OPTIONAL)
    assert not any(values[KERNEL_NAMES.get(name, name)] for name in OPTIONAL)
    assert values["transitions"] == values["state_count"] == 0


def test_every_launch_has_another_ticket():
    tickets = {passed_by(None, ())[0]["ticket"] for _ in range(3)}
    assert len(tickets) == 3 and 0 not in tickets
