"""A backend for tests that offers saved states in both directions: the reference, whose backward shows what it was given."""

SAVING = """
import torch
from kda_core.contract import FLOAT_TENSORS
from kda_core.reference import ReferenceBackend

class Backend(ReferenceBackend):
    given = []  # of every backward: (shape, saved states, residual, names of the gradients that core allocated)
    forwards = []  # of every forward: (shape, whether it was to save states)

    def workspace_bytes(self, shape):
        return 16

    def backward_workspace_bytes(self, shape):
        return 48

    def chunk_fwd(self, inputs, outputs):
        self.forwards.append((inputs.shape, outputs.saved_states is not None))
        for x in (outputs.saved_states, outputs.residual):
            if x is not None:
                x.fill_(torch.nan)
        return super().chunk_fwd(inputs, outputs)

    def chunk_bwd_into(
        self, inputs, grad_o, grad_final_state, gradients, workspace, saved_states=None, residual=None
    ):
        assert workspace.numel() == 48 and grad_o.is_contiguous()
        names = [n for n in FLOAT_TENSORS if getattr(gradients, n) is not None]
        self.given.append((inputs.shape, saved_states, residual, names))
        found = self.chunk_bwd(inputs, grad_o, grad_final_state)
        for name in names:
            getattr(gradients, name).copy_(getattr(found, name))
"""


def install_saving(install, name="saving", **fields):
    """Installs the backend, and returns its class."""
    import importlib

    install(name, backend=SAVING, **({"priority": 1} | fields))
    return importlib.import_module(f"fake_{name}_backend").Backend
