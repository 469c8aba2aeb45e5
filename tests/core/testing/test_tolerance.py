"""Every rounding of the specification is within the tolerance, and a wrong result is not."""

import pytest
import torch

from kda_core.testing import error, token_oracle, tolerance
from kda_core.testing.specification import BLOCK, bf16, dithered, forward

PACKED = (0, 1, 20, 2, 1, 0, 5)


def short_call(seed, lengths=None):
    """Returns a call of one token without a state, or of packed `lengths` with states. o of a single token without a state is
    (q . k) beta v, and q . k is often near zero."""
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *s: torch.randn(*s, generator=rng)
    T = 1 if lengths is None else sum(lengths)
    x = {
        "q": normal(1, T, 2, 128).bfloat16(),
        "k": normal(1, T, 2, 128).bfloat16(),
        "v": normal(1, T, 4, 128).bfloat16(),
        "g": -3 * torch.rand(1, T, 4, 128, generator=rng),
        "beta": normal(1, T, 4).sigmoid(),
        "use_qk_l2norm_in_kernel": True,
    }
    if lengths is not None:
        x["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
        x["initial_state"] = 0.1 * normal(len(lengths), 4, 128, 128)
    return x


@pytest.mark.parametrize("lengths", (None, PACKED), ids=("one token", "packed"))
def test_every_rounding_of_the_specification_is_within_the_tolerance(lengths):
    for seed in range(12 if lengths is None else 3):
        x = short_call(seed, lengths)
        want = token_oracle(**x)
        limits = tolerance(x, oracle=want)
        for other in range(1000, 1004):
            with dithered(other):
                found = forward(C=BLOCK, **x)
            assert error(found[0], want[0], lengths=lengths) <= limits[0], (seed, other)
            assert error(found[1], want[1], state=True) <= limits[1], (seed, other)


def test_the_tolerance_of_a_short_sequence_still_finds_a_wrong_state():
    """A state that is 3% too large is outside the tolerance of o and of the state."""
    x = short_call(0, PACKED)
    want, wrong = token_oracle(**x), x | {"initial_state": 1.03 * x["initial_state"]}
    limits = tolerance(x, oracle=want)
    o, state = token_oracle(**wrong)
    assert error(o, want[0], lengths=PACKED) > limits[0]
    assert error(state, want[1], state=True) > limits[1]


def test_long_sequences_are_judged_by_one_rounding():
    """Errors average over many rows, so further roundings would only loosen the tolerance."""
    x = short_call(0, (BLOCK + 1, 40))
    want = token_oracle(**x)
    errors = [error(forward(C=C, **x)[0], want[0], lengths=(BLOCK + 1, 40)) for C in (16, 32, 64)]
    assert tolerance(x, oracle=want)[0] == pytest.approx(2 * (max(errors) + 2**-9))


def test_a_dithered_rounding_keeps_what_bf16_holds():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    with dithered(0):
        assert torch.equal(bf16(x.float()), x.float())
