"""The tcgen05 descriptors of `kda_sm100.kernels.tensor` equal those that the DSL encodes for the same products, and have the fields of the
PTX ISA's tables."""

import pytest
import torch
from helpers.nightly import nightly

import ptx_emulator
from ptx_emulator import tensor_memory

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the module imports it")

LEADING = (
    0x3FFF << 16
)  # bytes from a panel to the next: not used if there is one panel, or if the operand is K-major
ADDRESS = 0x3FFF  # bits of a matrix descriptor that hold the shared address, in units of 16 bytes


#: Fields with their bits, the lowest first. Source: PTX ISA, "Instruction descriptor" for .kind::f16, and "Shared memory descriptor".
INSTRUCTION = {
    "sparsity selector": 2, "sparse": 1, "saturate": 1, "D": 2, "reserved 6": 1, "A": 3, "B": 3, "negate A": 1, "negate B": 1,
    "A MN-major": 1, "B MN-major": 1, "N / 8": 6, "reserved 23": 1, "M / 16": 5, "reserved 29": 1, "shift": 2,
}  # fmt: skip
MATRIX = {
    "start": 14, "reserved 14": 2, "leading": 14, "reserved 30": 2, "stride": 14, "constant 1": 3, "base offset": 3,
    "leading is absolute": 1, "reserved 53": 8, "swizzle": 3,
}  # fmt: skip
FP32_D, BF16, SWIZZLE_128, SWIZZLE_64 = 1, 1, 2, 4

#: Of every operand of the kernels: rows, columns and MN-major of its image; then N, and the leading and the stride offset in units of 16 bytes.
OPERANDS = {
    "w of 64": ((64, 128, False), 64, 1, 64, SWIZZLE_128),
    "w of 32": ((32, 128, False), 32, 1, 64, SWIZZLE_128),
    "Kg of 64": ((64, 128, True), 128, 512, 64, SWIZZLE_128),
    "Kg of 32": ((32, 128, True), 128, 256, 64, SWIZZLE_128),
    "Aqk of 64": ((64, 64, False), 64, 1, 64, SWIZZLE_128),
    "Aqk of 32": ((32, 32, False), 32, 1, 32, SWIZZLE_64),
    "Aqk and T of the reverse chain": ((64, 64, True), 64, 512, 64, SWIZZLE_128),
    "states of the gradients kernel": ((128, 128, False), 128, 1, 64, SWIZZLE_128),
}


def nonzero_fields(descriptor, table):
    found, place = {}, 0
    for name, bits in table.items():
        if value := descriptor >> place & (1 << bits) - 1:
            found[name] = value
        place += bits
    assert place in (32, 64) and descriptor >> place == 0
    return found


@pytest.mark.parametrize(("image", "n", "leading", "stride", "swizzle"), OPERANDS.values(), ids=OPERANDS)
def test_descriptors_have_the_fields_of_the_tables(image, n, leading, stride, swizzle):
    from kda_sm100.kernels.tensor import Operand, instruction

    operand, major = Operand(*image), {"B MN-major": 1} if image[2] else {}
    common = {"D": FP32_D, "A": BF16, "B": BF16, "N / 8": n // 8}
    assert nonzero_fields(operand.instruction, INSTRUCTION) == common | major | {"M / 16": 8}
    of_images = instruction(n, image[2], m=64, a_mn_major=True)
    assert nonzero_fields(of_images, INSTRUCTION) == common | major | {"M / 16": 4, "A MN-major": 1}
    fields = {"leading": leading, "stride": stride, "constant 1": 1, "swizzle": swizzle}
    assert nonzero_fields(operand.bits, MATRIX) == fields


def test_the_operands_above_are_those_of_the_kernels():
    from kda_sm100.config import BackwardChainConfig, ChainConfig
    from kda_sm100.kernels import chain, gradients, reverse

    found = [gradients.TOKENS, gradients.CHANNELS]
    kernels = [chain.ChainKernel(ChainConfig(C)) for C in (64, 32)]
    for kernel in (*kernels, reverse.ReverseChainKernel(BackwardChainConfig())):
        found += [x for x in vars(kernel).values() if isinstance(x, type(gradients.TOKENS))]
    shapes = {((16 * x.steps, x.n) if x.mn_major else (x.n, 16 * x.steps)) + (x.mn_major,) for x in found}
    assert shapes == {image for image, *_ in OPERANDS.values()}


@pytest.fixture
def decoded(monkeypatch):
    """Returns two lists that the emulator fills: the instruction descriptors and the matrix descriptors that it decodes."""
    instructions, matrices = [], []

    def shape_of(descriptor, kind, pair=False, *, decode=tensor_memory.shape_of):
        instructions.append(descriptor)
        return decode(descriptor, kind, pair)

    def matrix_of(warp, descriptor, *, decode=tensor_memory.matrix_of):
        matrices.append(descriptor)
        return decode(warp, descriptor)

    monkeypatch.setattr(tensor_memory, "shape_of", shape_of)
    monkeypatch.setattr(tensor_memory, "matrix_of", matrix_of)
    return instructions, matrices


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("C", (nightly(64), 32))
@pytest.mark.parametrize("name", ("w", "kg", "aqk"))
def test_descriptors_equal_those_of_the_dsl(name, C, decoded):
    from helpers.emulator.gemm_kernel import M, compiled

    from kda_sm100.config import HEAD_DIM
    from kda_sm100.kernels.tensor import Operand

    operand, n, k, majors = {
        "w": (Operand(C, HEAD_DIM), C, HEAD_DIM, ("K", "K")),
        "kg": (Operand(C, HEAD_DIM, mn_major=True), HEAD_DIM, C, ("K", "MN")),
        "aqk": (Operand(C, C), C, C, ("K", "K")),
    }[name]
    a, b, d = torch.zeros(M, k).bfloat16(), torch.zeros(n, k).bfloat16(), torch.zeros(M, n)
    with ptx_emulator.device("sm_100a"):
        compiled(n, k, majors)(a, b, d)
    instructions, matrices = decoded
    of_b = matrices[::2]  # of each product the emulator decodes B before A
    assert set(instructions) == {operand.instruction} and len(of_b) == operand.steps
    assert {descriptor & ~ADDRESS for descriptor in of_b} == {operand.bits}
    starts = [(descriptor & ADDRESS) << 4 for descriptor in of_b]
    assert [start - starts[0] for start in starts] == [operand.offset(i) for i in range(operand.steps)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("rows", "columns", "a_mn_major", "b", "majors"),
    [(64, 128, True, (64, 128, True), ("MN", "MN")), (64, 128, True, (64, 64, True), ("MN", "MN")),
     (128, 128, False, (64, 128, False), ("K", "K")), nightly(64, 128, False, (128, 128, False), ("K", "K")),
     nightly(64, 128, False, (64, 128, False), ("K", "K"))],
    ids=("dO Qd", "dO Aqk", "channels", "tokens by states", "tokens by tokens"),
)  # fmt: skip
def test_descriptors_of_two_images_equal_those_of_the_dsl(rows, columns, a_mn_major, b, majors, decoded):
    """A in shared memory, as the chain and the gradients kernel of a backward have it."""
    from helpers.emulator.gemm_kernel import compiled

    from kda_sm100.kernels.tensor import Operand, instruction

    left, right = Operand(rows, columns, a_mn_major), Operand(*b)
    m, k = left.n, 16 * right.steps
    x, y, z = torch.zeros(m, k).bfloat16(), torch.zeros(right.n, k).bfloat16(), torch.zeros(m, right.n)
    with ptx_emulator.device("sm_100a"):
        compiled(right.n, k, majors, "16x256b", False, m)(x, y, z)
    instructions, matrices = decoded
    assert set(instructions) == {instruction(right.n, right.mn_major, m, a_mn_major)}
    for operand, of_one in ((right, matrices[::2]), (left, matrices[1::2])):
        panels = operand.mn_major and operand.n > 64
        used = ~ADDRESS if panels else ~(ADDRESS | LEADING)
        assert {descriptor & used for descriptor in of_one} == {operand.bits & used}
        starts = [(descriptor & ADDRESS) << 4 for descriptor in of_one]
        assert [start - starts[0] for start in starts] == [operand.offset(i) for i in range(right.steps)]


@pytest.mark.parametrize("C", (64, 32))
def test_shared_memory_fits_on_an_sm(C):
    from kda_sm100.config import ChainConfig, SummaryConfig
    from kda_sm100.kernels.chain import SHARED_BYTES, ChainKernel
    from kda_sm100.kernels.summary import SummaryKernel

    assert ChainKernel(ChainConfig(C)).shared_bytes <= SHARED_BYTES
    assert SummaryKernel(SummaryConfig(C)).shared_bytes <= SHARED_BYTES
