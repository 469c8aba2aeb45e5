"""Reads a cubin: the ELF image that ptxas makes of a kernel, and how the DSL embeds it in an object file.

Only what the store needs: symbols, the parameters of a kernel, its threads, the version of ptxas.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

_ELF = b"\x7fELF"
#: The symbol of an object file of the DSL that holds the device code, as a fat binary or as a cubin.
_EMBEDDED = "kernels_binary"
_FATBIN_MAGIC, _FATBIN_CUBIN = 0xBA55ED50, 2
_CUDA_MACHINE = 190

#: Attributes of a section ``.nv.info.<kernel>``, as (format, attribute).
_PARAMETER, _PARAMETER_BYTES, _MAX_THREADS = (4, 0x17), (3, 0x19), (4, 0x10)


class CubinError(ValueError):
    """An image is not what the store expects."""


class Section(NamedTuple):
    """A section of an ELF image."""

    name: str
    address: int
    content: bytes


class Symbol(NamedTuple):
    """A symbol of an ELF image, and the number of its section."""

    name: str
    section: int
    value: int
    size: int
    function: bool


class Parameter(NamedTuple):
    """A parameter of a kernel: its place in the parameter buffer."""

    offset: int
    size: int


@dataclass(frozen=True)
class Entry:
    """A kernel of a cubin.

    Attributes:
        symbol: its name.
        parameters: in order.
        parameter_bytes: of all parameters.
        max_threads: of a CTA, by axis; None if the kernel has no limit.
    """

    symbol: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    max_threads: tuple[int, int, int] | None


class Elf:
    """An ELF image of 64 bits, little-endian.

    Raises:
        CubinError: it is not one.
    """

    def __init__(self, image: bytes) -> None:
        if image[:6] != _ELF + b"\x02\x01" or len(image) < 64:
            raise CubinError("not an ELF image of 64 bits")
        try:
            self._read(image)
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise CubinError(f"a damaged ELF image: {error}") from error

    def _read(self, image: bytes) -> None:
        self.machine = struct.unpack_from("<H", image, 18)[0]
        (start,) = struct.unpack_from("<Q", image, 40)
        entry_bytes, count, names = struct.unpack_from("<3H", image, 58)
        headers = [
            struct.unpack_from("<2I4Q2I2Q", image, start + number * entry_bytes) for number in range(count)
        ]
        nobits = 8
        contents = [
            b"" if kind == nobits else image[offset : offset + size]
            for _, kind, _, _, offset, size, *_ in headers
        ]
        self.sections = [
            Section(_text(contents[names], name), address, content)
            for (name, _, _, address, *_), content in zip(headers, contents, strict=True)
        ]
        self.symbols: list[Symbol] = []
        table = 2  # SHT_SYMTAB
        for (_, kind, _, _, _, _, link, *_), content in zip(headers, contents, strict=True):
            if kind == table:
                for name, info, _, section, value, size in struct.iter_unpack("<IBBHQQ", content):
                    self.symbols.append(
                        Symbol(_text(contents[link], name), section, value, size, info & 15 == 2)
                    )

    def section(self, name: str) -> bytes:
        """Returns the content of a section.

        Raises:
            CubinError: there is none of this name.
        """
        for section in self.sections:
            if section.name == name:
                return section.content
        raise CubinError(f"no section {name}")


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def cubin_of(host: bytes) -> bytes:
    """Returns the cubin in an object file of the DSL.

    Raises:
        CubinError: the object has no cubin, or more than one.
    """
    elf = Elf(host)
    found = [symbol for symbol in elf.symbols if symbol.name == _EMBEDDED]
    if len(found) != 1:
        raise CubinError(f"expected one symbol {_EMBEDDED}, found {len(found)}")
    symbol = found[0]
    section = elf.sections[symbol.section]
    start = symbol.value - section.address
    image = section.content[start : start + symbol.size]
    if image[:4] == _ELF:
        return image
    return _from_fatbin(image)


def _from_fatbin(image: bytes) -> bytes:
    """Returns the only image of a fat binary: a header of 16 bytes, then for each image a header with its size."""
    magic, _, header_bytes, total = struct.unpack_from("<I2HQ", image)
    if magic != _FATBIN_MAGIC:
        raise CubinError(f"{_EMBEDDED} is neither a cubin nor a fat binary")
    kind, _, entry_bytes, size = struct.unpack_from("<2HIQ", image, header_bytes)
    content = image[header_bytes + entry_bytes :][:size]
    if entry_bytes + size != total:
        raise CubinError("the fat binary holds more than one image")
    if kind != _FATBIN_CUBIN or content[:4] != _ELF:
        raise CubinError("the fat binary holds no cubin that is not compressed")
    return content


def entries(image: bytes) -> list[Entry]:
    """Returns the kernels of a cubin.

    Raises:
        CubinError: the image is not a cubin.
    """
    elf = Elf(image)
    if elf.machine != _CUDA_MACHINE:
        raise CubinError(f"an ELF image for machine {elf.machine}, not a cubin")
    prefix = ".nv.info."
    return [
        _entry(section.name[len(prefix) :], section.content)
        for section in elf.sections
        if section.name.startswith(prefix)
    ]


def _entry(symbol: str, content: bytes) -> Entry:
    found: dict[int, Parameter] = {}
    total, threads, at = 0, None, 0
    try:
        while at < len(content):
            kind, short = content[at : at + 2], struct.unpack_from("<H", content, at + 2)[0]
            attribute, at = (kind[0], kind[1]), at + 4
            value = content[at : at + short] if kind[0] == 4 else b""
            at += len(value)
            if attribute == _PARAMETER:
                _, ordinal, offset, flags = struct.unpack("<I2HI", value)
                found[ordinal] = Parameter(offset, flags >> 18)
            elif attribute == _PARAMETER_BYTES:
                total = short
            elif attribute == _MAX_THREADS:
                threads = struct.unpack("<3I", value)
    except (struct.error, IndexError) as error:
        raise CubinError(f"damaged attributes of {symbol}: {error}") from error
    return Entry(symbol, tuple(found[n] for n in sorted(found)), total, threads)


def ptxas_version(image: bytes) -> str:
    """Returns the version of ptxas that made a cubin, such as "13.1.80".

    Raises:
        CubinError: the image does not say it.
    """
    match = re.search(rb"\bV(\d+\.\d+\.\d+)\b", Elf(image).section(".note.nv.tkinfo"))
    if match is None:
        raise CubinError("the cubin does not name the version of ptxas")
    return match[1].decode()
