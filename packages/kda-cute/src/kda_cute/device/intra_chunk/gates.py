"""Gates: log decays in base 2 from raw g, and the sigmoid of beta."""

from cutlass import Float32

from kda_cute.device import ptx
from kda_cute.device.ptx import LOG2E
from kda_cute.records import IntraChunkConfig

#: 2^G_FLOOR is 0 in fp32. Unbounded log decays are clamped here, so that masks of -1000 and -inf do not spoil the sum.
G_FLOOR = -104.0 * LOG2E
#: Upper bound of the rate exp(A_log) of a softplus gate: 1/rate stays a normal number.
MAX_RATE = 2.0**60


def sigmoid(x: Float32) -> Float32:
    """Returns 1/(1 + e^-x). It is right at both ends, although e^-x may overflow."""
    return ptx.rcp(ptx.ex2(x * Float32(-LOG2E)) + Float32(1.0))


def scaled_softplus2(x: Float32, bias: Float32, scale: Float32) -> Float32:
    """Returns ``scale`` times softplus(x + bias) in base 2, at most 1. The relative error is about 2^-16.

    With y = (x + bias) log2(e), softplus in base 2 is max(y, 0) + log2(1 + t), t = 2^-|y| in (0, 1]. ln(1 + t) / t is a
    minimax polynomial (relative error 2^-16.9), and log2(e) in each coefficient makes it log2: the logarithm of a sum near
    1 would lose the small gates of channels that hardly decay. Saturation gives max(y, 0) and the upper limit without
    further instructions.
    """
    t = ptx.ex2(-ptx.absolute(ptx.fma(x, Float32(LOG2E), bias * Float32(LOG2E))))
    series = scale * Float32(-0.023869155 * LOG2E)
    for coefficient in (0.101222299, -0.210048705, 0.325206697, -0.499361366, 0.999991596):
        series = ptx.fma(series, t, scale * Float32(coefficient * LOG2E))
    slope = scale * Float32(LOG2E)
    return ptx.fma_saturated(t, series, ptx.fma_saturated(x, slope, bias * slope))


def gate_rate(a_log: Float32) -> Float32:
    """Returns exp(A_log), at most `MAX_RATE`."""
    return ptx.minimum(ptx.ex2(a_log * Float32(LOG2E)), Float32(MAX_RATE))


class Gate:
    """One head's gate as a product. For a token that exists:

        log decay in base 2 = activate(g, bias) * log_scale,    activate >= 0 >= log_scale

    `Decay` stores ``log_scale`` for each row, and 0 for rows beyond the sequence, which then do not decay.

    =========== ========= ======================================= ===========
    gate        unbounded activate                                log_scale
    =========== ========= ======================================= ===========
    precomputed no        -g                                      -log2(e)
    precomputed yes       min(-g, 104)                            -log2(e)
    bounded     no        sigmoid(rate (g + bias))                lower_bound log2(e)
    bounded     yes       the same in units of the floor          G_FLOOR
    softplus    yes       rate softplus2(g + bias), also in these G_FLOOR
    =========== ========= ======================================= ===========

    In units of the floor, 1 is `G_FLOOR`: the saturation of a multiply-add then clamps the log decay at no cost.
    ``rate``: exp(A_log). ``lower_bound``: of a bounded gate, in base e.
    """

    def __init__(self, config: IntraChunkConfig, rate: Float32, lower_bound: Float32):
        self.gate, self.unbounded, self.rate = config.gate, config.unbounded, rate
        if self.gate == "bounded":
            factor = lower_bound * Float32(LOG2E)
        else:
            factor = -rate if self.gate == "softplus" else Float32(-LOG2E)
        in_floors = self.unbounded and self.gate != "precomputed"
        self.log_scale = Float32(G_FLOOR) if in_floors else factor
        self.floor_scale = factor * Float32(
            1.0 / G_FLOOR
        )  # as `factor`, but the result is in units of the floor

    def activate(self, g: Float32, bias: Float32) -> Float32:
        """Returns the gate of one raw g, at least 0; times ``log_scale`` it is the log decay."""
        if self.gate == "precomputed":
            return ptx.minimum(-g, Float32(G_FLOOR / -LOG2E)) if self.unbounded else -g
        if self.gate == "softplus":
            return scaled_softplus2(g, bias, self.floor_scale)
        steepness = self.rate * Float32(-LOG2E)
        gate = ptx.rcp(ptx.ex2(ptx.fma(g, steepness, bias * steepness)) + Float32(1.0))
        return ptx.fma_saturated(gate, self.floor_scale, Float32(0.0)) if self.unbounded else gate
