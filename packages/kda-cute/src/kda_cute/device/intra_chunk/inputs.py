"""The inputs of a chunk: their addresses, and those that go to registers."""

from typing import Any, NamedTuple

from cutlass import Float32, Int64

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.gates import sigmoid
from kda_cute.records import HEAD_DIM, IntraChunkConfig


class Chunk(NamedTuple):
    """One chunk of one sequence and value head.

    ``head``: value head. ``token``: first token in B*T. ``key_row``: row of that token and its key head in q and k,
    ``token * H + key head``. ``valid``: tokens of the chunk, 1 to C; rows from there on count as zero in q, k, g and beta.
    All are Int32.
    """

    head: Any
    token: Any
    key_row: Any
    valid: Any


class Inputs:
    """Addresses of the inputs of a call ``x`` (`kda_cute.device.intra_chunk.IntraChunk`), whose rows are contiguous. Rows of g are counted
    in 32 bits (`host.refusal`)."""

    def __init__(self, config: IntraChunkConfig):
        self.config = config
        self.gate_bytes = 2 if config.gate_dtype == "bfloat16" else 4

    def key_address(self, x, name, chunk: Chunk, row):
        """Returns the address of q or k (``name``) of token ``row`` of a chunk."""
        return getattr(x, name) + Int64(chunk.key_row + row * x.H) * (2 * HEAD_DIM)

    def key_pitch(self, x, name):
        """Returns the bytes from a token of q or k (``name``) to the next."""
        return x.H * (2 * HEAD_DIM)

    def gate_pitch(self, x):
        """Returns the bytes from a token of g to the next."""
        return x.HV * (HEAD_DIM * self.gate_bytes)

    def gate_address(self, x, chunk: Chunk, row):
        """Returns the address of g of token ``row`` of a chunk."""
        value_row = chunk.token * x.HV + chunk.head
        return x.g + Int64(value_row + row * x.HV) * (HEAD_DIM * self.gate_bytes)

    def beta_address(self, x, chunk: Chunk, row):
        """Returns the address of beta of token ``row`` of a chunk."""
        value_row = chunk.token * x.HV + chunk.head
        return x.beta + (Int64(value_row) + row * x.HV) * x.beta_bytes

    def load_beta(self, x, chunk: Chunk, row):
        """Returns beta of token ``row`` of a chunk as bf16 bits and as fp32, one of which is 0."""
        address = self.beta_address(x, chunk, row)
        exists, is_bf16 = row < chunk.valid, x.beta_bytes == 2
        # Two loads, one of which does nothing. An instruction that combined them here would wait for memory.
        return (
            ptx.load_global_u16(address, exists & is_bf16),
            ptx.load_global_f32(address, exists & (x.beta_bytes == 4)),
        )

    def activated_beta(self, x, beta_bf16, beta_fp32, exists):
        """Returns ``beta_factor`` times the sigmoid of a loaded beta, or beta as it is if ``beta_factor`` is 0; 0 unless it ``exists``."""
        beta = ptx.unpack_bf16x2(beta_bf16)[0] + beta_fp32
        beta = ptx.select(x.beta_factor > Float32(0.0), sigmoid(beta) * x.beta_factor, beta)
        return ptx.select(exists, beta, Float32(0.0))
