"""The intra-chunk stage over strided inputs, such as views of one projection."""

from cutlass import Int64

from kda_cute.device.intra_chunk import Chunk, IntraChunk
from kda_cute.device.intra_chunk.inputs import Inputs
from kda_cute.records import HEAD_DIM


class StridedInputs(Inputs):
    """`Inputs` whose tokens are at any distance.

    ``x`` also has ``q_pitch``, ``k_pitch``, ``g_pitch`` and ``beta_pitch`` (Int64): bytes from a token to the next. The heads of a token
    are contiguous. Rows of q, k and g start at multiples of 16 bytes.
    """

    def key_address(self, x, name, chunk: Chunk, row):
        key_head = chunk.key_row - chunk.token * x.H
        return token_address(x, name, chunk, row) + Int64(key_head) * (2 * HEAD_DIM)

    def key_pitch(self, x, name):
        return getattr(x, f"{name}_pitch")

    def gate_pitch(self, x):
        return x.g_pitch

    def gate_address(self, x, chunk: Chunk, row):
        return token_address(x, "g", chunk, row) + Int64(chunk.head) * (HEAD_DIM * self.gate_bytes)

    def beta_address(self, x, chunk: Chunk, row):
        return token_address(x, "beta", chunk, row) + Int64(chunk.head) * x.beta_bytes


class StridedIntraChunk(StridedInputs, IntraChunk):
    """`IntraChunk` over strided inputs."""


def token_address(x, name, chunk: Chunk, row):
    """Returns the address of token ``row`` of a chunk in the input ``name``."""
    return getattr(x, name) + Int64(chunk.token + row) * getattr(x, f"{name}_pitch")
