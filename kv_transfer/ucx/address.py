"""A worker's address: UCX's, behind a magic word, a crc32c (UCX aborts the process on an address that it cannot parse) and the
identity of the process (liveness.py)."""

from __future__ import annotations

import struct
from typing import Any

from ucxx._lib import libucxx

from baton.errors import TransferFailed
from baton.kv_copy import crc32c
from kv_transfer.liveness import ProcessIdentity

_ADDRESS_MAGIC = b"BUC1"
_ADDRESS_HEAD = struct.Struct("<4sIIQ")  # magic, crc32c of what follows, pid, start time of the process
_ADDRESS_UNCHECKED_BYTES = 8  # magic and crc


def pack_address(ucx_address: bytes, process: ProcessIdentity) -> bytes:
    rest = _ADDRESS_HEAD.pack(b"", 0, process.pid, process.start_ticks)[_ADDRESS_UNCHECKED_BYTES:] + ucx_address
    return _ADDRESS_MAGIC + crc32c(memoryview(rest)).to_bytes(4, "little") + rest


def parse_address(address: bytes) -> tuple[Any, ProcessIdentity]:
    """Split a peer's address.

    Raises:
        TransferFailed: it is not one.
    """
    if len(address) > _ADDRESS_HEAD.size:
        magic, crc, pid, start_ticks = _ADDRESS_HEAD.unpack_from(address)
        if magic == _ADDRESS_MAGIC and crc == crc32c(memoryview(address)[_ADDRESS_UNCHECKED_BYTES:]):
            ucx_address = libucxx.UCXAddress.create_from_buffer(address[_ADDRESS_HEAD.size :])
            return ucx_address, ProcessIdentity(pid, start_ticks)
    raise TransferFailed("the peer's address is not a UCX address of this protocol")
