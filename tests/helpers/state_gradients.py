"""How segments act on gradients of states (`kda_core.backend.SupportsStateGradients`), compared with fp64 autograd."""

import math
from itertools import accumulate

import torch

from helpers.aligned import aligned
from helpers.sm90_backward import relative_error
from kda_core import buffers, validate
from kda_core.backend import SupportsStateGradients
from kda_core.contract import KdaOptions
from kda_core.testing import backward_specification, make_inputs, token_oracle
from kda_cute.testing.emulation import EmulatedBackend

HEAD_DIM = 128
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu")
NAN = float("nan")
#: The gradients of initial states of a whole backward have relative errors of 2e-3 to 6e-3.
LIMIT = 8e-3
#: Largest error of transitions in relation to that of the specification on the same inputs, which grows with the length of a segment.
RATIO = 2
#: Largest error of the transition of a single segment. Behind steep gates a few numbers dominate it, whose roundings do not average: one
#: of 20 segments has 0.058, although all together have less than the specification.
SINGLE = {"steep": 10 * LIMIT}


def summaries(backend, arch, family, lengths, heads, device, last=None, **emulation):
    """Returns the gradients of initial states and the transposed transitions of packed segments, the same in fp64, and the
    transitions by the specification.

    Args:
        backend, arch: the backend object, and the architecture for which its kernels are compiled where CPU tensors emulate them.
        last: the segment whose state has a gradient at its end.
        emulation: options of `ptx_emulator.device`.
    """
    H, HV = heads
    x = make_inputs(family, sum(lengths), H=H, HV=HV, lengths=lengths, device=device).arguments
    x = {n: x[n] for n in x if n not in ("initial_state", "output_final_state")}
    known = {f: x[f] for f in KdaOptions.__dataclass_fields__ if f in x}
    options = KdaOptions(**known, output_final_state=True, needs_backward=True)
    tensors = [x.get(name) for name in TENSORS]
    inputs = buffers.make_inputs(tensors, validate.problem_shape(*tensors, options=options))
    rng = torch.Generator().manual_seed(1)
    N = len(lengths)
    grad_o = torch.randn(x["v"].shape, generator=rng).to(x["v"])
    grad_final = torch.zeros(N, HV, HEAD_DIM, HEAD_DIM)
    if last is not None:
        grad_final[last] = torch.randn(grad_final.shape[1:], generator=rng)
    grad_final = grad_final.to(device)

    assert isinstance(backend, SupportsStateGradients)
    size = backend.state_gradients_workspace_bytes(inputs.shape)
    if device == "cpu":
        backend = EmulatedBackend(backend, arch, emulation)
    found, transitions = torch.full((2, N, HV, HEAD_DIM, HEAD_DIM), NAN, device=device).unbind()
    given = None if last is None else grad_final
    backend.initial_state_gradients(inputs, grad_o, given, found, transitions, aligned(size, device))

    want, want_transitions, specified = [], [], []
    of_tokens = ("q", "k", "v", "g", "beta")
    for i, (start, length) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
        segment = {n: y[:, start : start + length] if n in of_tokens else y for n, y in x.items()}
        segment = {n: y for n, y in segment.items() if not n.startswith("cu_seqlens")}
        state = torch.zeros(1, HV, HEAD_DIM, HEAD_DIM, device=device, dtype=torch.float64, requires_grad=True)
        o, final = token_oracle(**segment, initial_state=state)
        total = (o * grad_o[:, start : start + length].double()).sum()
        want.append(torch.autograd.grad(total + (final * grad_final[i].double()).sum(), state)[0][0])
        identity = torch.eye(HEAD_DIM, device=device).expand(1, HV, -1, -1)
        segment["v"] = torch.zeros_like(segment["v"])
        segment["initial_state"] = identity
        want_transitions.append(token_oracle(**segment)[1][0].mT)
        of_segment = backward_specification.backward(segment, None, identity, 64)
        specified.append(of_segment["initial_state"][0])
    return (found, transitions), (torch.stack(want), torch.stack(want_transitions), specified)


def error_of_transitions(found, want, segments):
    """Returns the root mean square of the relative errors of all segments and heads."""
    errors = [relative_error(x, y) for i in segments for x, y in zip(found[i], want[i], strict=True)]
    return math.sqrt(sum(e * e for e in errors) / len(errors))


def check(backend, arch, family, lengths, heads, device, last=None, **emulation):
    """Checks `summaries`, and returns what the backend has computed."""
    (found, transitions), (want, want_transitions, specified) = summaries(
        backend, arch, family, lengths, heads, device, last, **emulation
    )
    assert torch.isfinite(found).all() and torch.isfinite(transitions).all()
    filled = [i for i, length in enumerate(lengths) if length]
    limit = max(LIMIT, RATIO * error_of_transitions(specified, want_transitions, filled))
    assert error_of_transitions(transitions, want_transitions, filled) <= limit
    for i, length in enumerate(lengths):
        if length:
            assert relative_error(found[i], want[i]) <= LIMIT, i
            limit = max(SINGLE.get(family, LIMIT), RATIO * relative_error(specified[i], want_transitions[i]))
            assert relative_error(transitions[i], want_transitions[i]) <= limit, i
        else:
            assert torch.equal(found[i].double(), want[i])
            assert torch.equal(transitions[i].double(), want_transitions[i])
    return found, transitions
