"""The head of a GGUF file: metadata and where each tensor lies. Reads no weights.

Written for untrusted files: every count and length is checked against the bytes that are left before anything is made from it,
so a hostile header costs at most the file's own size. (`gguf.GGUFReader` trusts counts, and takes 2.4 s for the demo model
where this takes 0.1 s: measured on 2 cores.) Format: ggml/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from baton.errors import ConfigError

_T = TypeVar("_T")
Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # gguf.md
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 21  # of one array; the largest public vocabulary is 262,144 (Gemma 3), merges are about twice as many
_MAX_DIMS = 4  # GGML_MAX_DIMS
_DEFAULT_ALIGNMENT = 32  # gguf.md, general.alignment


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `shape` outermost first, as Hugging Face writes it; `offset` from the start of the file, in bytes."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]
    sha256: str  # of the header's bytes, in hex


def read_gguf_header(path: Path) -> GGUFHeader:
    """Parse the header and check that the file holds every byte of every tensor.

    Raises: ConfigError with one line that names the file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="model.path") from None
    except (ValueError, struct.error) as error:  # also: an empty file cannot be mapped, a string is not UTF-8
        raise ConfigError(f"{path} is not a whole GGUF file ({error}): fetch it again", field="model.path") from None


class _Cursor:
    """Reads forward; never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def need(self, nbytes: int) -> None:
        if nbytes > len(self.data) - self.at:
            raise ValueError(f"truncated: {nbytes} bytes wanted at {self.at} of {len(self.data)}")

    def scalars(self, code: str, count: int) -> list[int] | list[float] | list[bool]:
        nbytes = count * struct.calcsize("<" + code)
        self.need(nbytes)
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += nbytes
        return list(values)

    def integer(self, code: str) -> int:
        return int(self.scalars(code, 1)[0])

    def string(self) -> str:
        nbytes = self.integer("Q")
        self.need(nbytes)
        start, self.at = self.at, self.at + nbytes
        return self.data[start : self.at].decode()

    def strings(self, count: int) -> list[str]:
        self.need(8 * count)  # each has a u64 length
        return [self.string() for _ in range(count)]

    def value(self) -> Value:
        kind = self.integer("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalars(_code(kind), 1)[0]
        item, count = self.integer("I"), self.integer("Q")
        if count > _MAX_ITEMS:
            raise ValueError(f"an array of {count} items, limit {_MAX_ITEMS}")
        return self.strings(count) if item == _STRING else self.scalars(_code(item), count)


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return _SCALARS[kind]


def _parse(cursor: _Cursor) -> GGUFHeader:
    cursor.need(4)
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.integer("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}, known are 2 and 3")
    num_tensors, num_values = cursor.integer("Q"), cursor.integer("Q")
    metadata = _unique(num_values, lambda: (cursor.string(), cursor.value()))
    infos = _unique(num_tensors, lambda: (cursor.string(), _tensor_info(cursor)))

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment}")
    end = cursor.at
    start = -(-end // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in infos.items():
        tensor = GGUFTensor(shape, kind, start + offset, _tensor_bytes(shape, kind))
        if tensor.offset + tensor.nbytes > len(cursor.data):
            raise ValueError(f"truncated: {name} ends at {tensor.offset + tensor.nbytes} of {len(cursor.data)} bytes")
        tensors[name] = tensor
    return GGUFHeader(metadata, tensors, hashlib.sha256(cursor.data[:end]).hexdigest())


def _unique(count: int, read: Callable[[], tuple[str, _T]]) -> dict[str, _T]:
    """Read `count` named things; a name may come once. Stops at the end of the file, however large `count` is."""
    found: dict[str, _T] = {}
    for _ in range(count):
        name, value = read()
        if name in found:
            raise ValueError(f"{name[:64]!r} comes twice")
        found[name] = value
    return found


def _tensor_info(cursor: _Cursor) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
    num_dims = cursor.integer("I")
    if num_dims > _MAX_DIMS:
        raise ValueError(f"a tensor of {num_dims} dimensions, limit {_MAX_DIMS}")
    shape = tuple(int(n) for n in reversed(cursor.scalars("Q", num_dims)))  # the file has the innermost first
    return shape, GGMLQuantizationType(cursor.integer("I")), cursor.integer("Q")


def _tensor_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % block_elements:
        raise ValueError(f"a row of {shape[-1]} is not whole blocks of {kind.name}")
    return math.prod(shape) // block_elements * block_bytes
