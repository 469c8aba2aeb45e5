"""Backends for the tests of kda-cp whose backward writes into the memory that it is given, on top of the reference."""

from dataclasses import fields, replace

import torch

import kda_core
from kda_core.backend import BackendSpec
from kda_core.contract import FLOAT_TENSORS, Feature
from kda_core.reference import ReferenceBackend

SPEC = BackendSpec(
    name="writing",
    abi=kda_core.BACKEND_ABI,
    archs=frozenset({"cpu"}),
    features=frozenset(f.value for f in Feature if f is not Feature.SEGMENT_SUMMARY),
    target="helpers.writing_backend:Writing",
    install="pip install writing",
    priority=-150,
)
OLD = replace(
    SPEC,
    name="old-writing",
    abi=(2, 1),
    features=SPEC.features - {Feature.SAVED_STATES.value},
    target="helpers.writing_backend:OldWriting",
)
FORWARD = replace(
    SPEC,
    name="forward",
    features=SPEC.features - {Feature.BACKWARD.value},
    target="kda_core.reference:ReferenceBackend",
    priority=1,
)

#: Of every backward: its lengths, and the names of the gradients that it wrote. Tests clear the list before they use it.
calls = []


class Writing(ReferenceBackend):
    """Fills all memory that it is given with NaN before it computes."""

    saved = (None, None)  # what a backend with saved states receives here

    def backward_workspace_bytes(self, shape):
        return 8 * shape.T * shape.HV + 16 * shape.N

    def chunk_bwd_into(self, inputs, grad_o, grad_final_state, gradients, workspace, *saved):
        assert saved == self.saved and inputs.shape.options.needs_backward
        assert workspace.numel() >= self.backward_workspace_bytes(inputs.shape)
        assert grad_o.shape == inputs.v.shape and grad_o.is_contiguous() and grad_o.data_ptr() % 16 == 0
        if grad_final_state is not None:
            assert grad_final_state.shape == inputs.shape.state_shape and grad_final_state.is_contiguous()
        written = {f.name: x for f in fields(gradients) if (x := getattr(gradients, f.name)) is not None}
        calls.append((inputs.sequence_lengths(), tuple(written)))
        workspace.fill_(255)
        for name, x in written.items():
            assert x.shape == getattr(inputs, name).shape and x.is_contiguous()
            x.fill_(torch.nan)
        found = self.chunk_bwd(inputs, grad_o, grad_final_state)
        for name, x in written.items():
            x.copy_(getattr(found, name))


class OldWriting(Writing):
    """Knows no saved states, and expects memory for all gradients."""

    saved = ()

    def chunk_bwd_into(self, inputs, grad_o, grad_final_state, gradients, workspace):
        absent = [
            n for n in FLOAT_TENSORS if getattr(inputs, n) is not None and getattr(gradients, n) is None
        ]
        assert not absent
        super().chunk_bwd_into(inputs, grad_o, grad_final_state, gradients, workspace)
