"""What a UCX channel tells its peer of its own memory, inside the probe frame: the ring to write frames into, the pool to read.

The frame's checksum guards these bytes; what they claim is checked by whoever maps the memory (memory.py). Pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from baton.kv_copy import KVMemory
from kv_transfer.ucx.memory import Region

_REGION = struct.Struct("<QQH")  # address, bytes, bytes of the remote key behind it
_POOL = struct.Struct("<QQQQI")  # KVMemory's fields, blocks


@dataclass(frozen=True, slots=True)
class PoolExport:
    """A block pool inside a region. `memory` holds addresses of the owner's process."""

    region: Region
    memory: KVMemory
    num_blocks: int

    def at(self, address: int) -> KVMemory:
        """The pool where `region` is mapped at `address`."""
        place = address + self.memory.address - self.region.address
        return KVMemory(place, self.memory.nbytes, self.memory.layer_stride, self.memory.component_stride)


@dataclass(frozen=True, slots=True)
class Exports:
    ring: Region
    pool: PoolExport | None  # None: direct mode is not offered

    def pack(self) -> bytes:
        data = _pack_region(self.ring)
        if self.pool is not None:
            memory = self.pool.memory
            data += _pack_region(self.pool.region) + _POOL.pack(
                memory.address, memory.nbytes, memory.layer_stride, memory.component_stride, self.pool.num_blocks
            )
        return data


def unpack_exports(data: bytes) -> Exports | None:
    """None where `data` is not what `Exports.pack` makes, or a pool lies outside its region."""
    try:
        ring, rest = _unpack_region(data)
        if not rest:
            return Exports(ring, None)
        region, rest = _unpack_region(rest)
        *fields, num_blocks = _POOL.unpack(rest)
        memory = KVMemory(*fields)
    except (struct.error, ValueError):
        return None
    return (
        Exports(ring, PoolExport(region, memory, num_blocks)) if region.holds(memory.address, memory.nbytes) else None
    )


def _pack_region(region: Region) -> bytes:
    return _REGION.pack(region.address, region.nbytes, len(region.rkey)) + region.rkey


def _unpack_region(data: bytes) -> tuple[Region, bytes]:
    address, nbytes, key_bytes = _REGION.unpack_from(data)
    stop = _REGION.size + key_bytes
    if stop > len(data):
        raise struct.error("the remote key is cut")
    return Region(address, nbytes, data[_REGION.size : stop]), data[stop:]
