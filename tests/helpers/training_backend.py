"""Backends for tests of split training calls, on top of the reference: their backwards compute from what the forward has saved.

One also summarises segments, forward and backward. The gradients of chunks come from the saved states alone, so a state in a wrong
slot gives wrong gradients.
"""

from dataclasses import replace
from itertools import accumulate

import torch

import kda_core
from helpers import segmented_backend
from helpers.segmented_backend import Merging
from kda_core import buffers, contract
from kda_core.backend import BackendSpec
from kda_core.contract import FLOAT_TENSORS, Feature, KdaOutputs, Tensors
from kda_core.reference import ReferenceBackend

SPEC = BackendSpec(
    name="training",
    abi=kda_core.BACKEND_ABI,
    archs=frozenset({"cpu"}),
    features=frozenset(f.value for f in Feature),
    target="helpers.training_backend:Native",
    install="pip install training",
    priority=-150,
)
GENERIC = replace(
    SPEC,
    name="generic",
    features=SPEC.features - {Feature.SEGMENT_SUMMARY.value},
    target="helpers.training_backend:Generic",
)

#: (method, lengths) of every call, in order, with those of `helpers.segmented_backend`. Tests clear the list before they use it.
calls = segmented_backend.calls


class ReadsSavedStates:
    """A backward of chunks: from the last to the first, each from its saved state."""

    def backward_workspace_bytes(self, shape):
        return 16 * shape.N

    def chunk_bwd_into(
        self, inputs, grad_o, grad_final_state, gradients, workspace, saved_states=None, residual=None
    ):
        s, lengths = inputs.shape, inputs.sequence_lengths()
        calls.append(("chunk_bwd" if saved_states is None else "chunk_bwd from saved states", lengths))
        assert s.options.needs_backward and workspace.numel() >= 16 * s.N
        assert (residual is not None) == (saved_states is not None and s.options.disable_recompute)
        written = [n for n in FLOAT_TENSORS if getattr(gradients, n) is not None]
        if saved_states is None:
            found = self.chunk_bwd(inputs, grad_o, grad_final_state)
            for name in written:
                getattr(gradients, name).copy_(getattr(found, name))
            return
        assert saved_states.shape == s.saved_states_shape
        for name in ("A_log", "dt_bias"):
            if name in written:
                getattr(gradients, name).zero_()
        starts = [0, *accumulate(lengths)]
        for n, (slots, length) in enumerate(zip(contract.saved_slots(s, lengths), lengths)):
            dS = torch.zeros(1, *s.state_shape[1:]) if grad_final_state is None else grad_final_state[n][None]
            for i in reversed(range(len(slots))):
                a, b = i * s.saved_spacing, min((i + 1) * s.saved_spacing, length)
                row, first = (0, starts[n]) if s.varlen else (n, 0)
                tokens = (slice(row, row + 1), slice(first + a, first + b))
                dS = self._chunk(inputs, grad_o, dS, tokens, saved_states[slots[i]], gradients, written)
            if gradients.initial_state is not None:
                gradients.initial_state[n] = dS[0]

    def _chunk(self, inputs, grad_o, dS, tokens, state, gradients, written):
        """Writes the gradients of one chunk; returns the gradient of the state before it."""
        state = state.float().mT if inputs.options.state_v_first else state.float()
        own = {name: getattr(inputs, name)[tokens] for name in ("q", "k", "v", "g", "beta")}
        tensors = Tensors(
            **own, A_log=inputs.A_log, dt_bias=inputs.dt_bias, initial_state=state[None].contiguous()
        )
        options = replace(inputs.options, output_final_state=True)
        shape = replace(
            inputs.shape,
            B=1,
            N=1,
            T=own["q"].shape[1],
            index_dtype=None,
            has_initial_state=True,
            options=options,
        )
        found = self.chunk_bwd(buffers.make_inputs(tensors, shape), grad_o[tokens], dS)
        for name in written:
            into = getattr(gradients, name)
            if name in own:
                into[tokens] = getattr(found, name)
            elif name != "initial_state":
                into += getattr(found, name)
        return found.initial_state


class Generic(ReadsSavedStates, ReferenceBackend):
    """Summarises no segments."""

    def chunk_fwd(self, inputs, outputs):
        calls.append(("chunk_fwd", inputs.sequence_lengths()))
        return super().chunk_fwd(inputs, outputs)


class Native(ReadsSavedStates, Merging):
    """Summarises segments in both directions, and has a merge kernel."""

    def state_gradients_workspace_bytes(self, shape):
        return 32

    def initial_state_gradients(self, inputs, grad_o, grad_final_state, gradients, transitions, workspace):
        calls.append(("initial_state_gradients", inputs.sequence_lengths()))
        s = inputs.shape
        assert not s.options.state_v_first and s.varlen and workspace.numel() == 32
        assert gradients.shape == (s.N, s.HV, s.K, s.V) and transitions.shape == (s.N, s.HV, s.K, s.K)
        # neither v nor states matter
        noise = replace(
            inputs, v=torch.randn_like(inputs.v), initial_state=torch.randn_like(inputs.initial_state)
        )
        gradients.copy_(self.chunk_bwd(noise, grad_o, grad_final_state).initial_state)
        options = replace(s.options, needs_backward=False)
        shape = replace(s, V=s.K, options=options)
        v = inputs.v.new_zeros(1, s.T, s.HV, s.K)
        eye = torch.eye(s.K).expand_as(transitions).contiguous()
        M = torch.empty_like(transitions)
        x = replace(inputs, v=v, initial_state=eye, shape=shape)
        ReferenceBackend.chunk_fwd(self, x, KdaOutputs(torch.empty_like(v), M))
        transitions.copy_(M.mT)
