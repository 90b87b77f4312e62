"""The header of a frame: 64 bytes, little-endian, in front of its payload in one slot.

    magic u32 | version u16 | kind u8 | flags u8 | epoch u64 | seq u64 | generation u32 | index u32 | block_start u32
    num_blocks u32 | layer_start u32 | num_layers u32 | nbytes u32 | turn u32 | payload_crc u32 | header_crc u32

The payload is `nbytes` long, in wire order (baton/kv_layout.py). `header_crc` is the crc32c of the 60 bytes before it, so a
header is believed as a whole or not at all; `payload_crc` is the crc32c of the payload. 64 bytes keep the payload aligned to
a cache line. A credit, the small answer to a frame, is

    magic u32 | turn u32 | accepted u16 | can_pull u16 | crc u32

A frame of direct mode carries no KV: its payload is the blocks' places in the sender's pool, u32 each, and `payload_crc` is the
crc32c of the KV that the receiver reads there.

Pure: no clock, no socket; knows nothing of tickets.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from baton.kv_copy import crc32c

MAGIC = 0x31564B42  # "BKV1" read as bytes
VERSION = 2
_FIELDS = struct.Struct("<IHBBQQIIIIIIIII")  # all but header_crc
_CRC = struct.Struct("<I")
HEADER_BYTES = 64
PLACE_BYTES = 4  # of one block in the payload of a PULL frame
_CREDIT_MAGIC = 0x31435642  # "BVC1" read as bytes
_CREDIT = struct.Struct("<IIHHI")
CREDIT_BYTES = _CREDIT.size
_TURNS = 1 << 32  # of a lane: u32
assert _FIELDS.size + _CRC.size == HEADER_BYTES


class Kind(enum.IntEnum):
    DATA = 1  # blocks of a ticket
    PROBE = 2  # proves the path; names no ticket
    PULL = 3  # where blocks of a ticket lie in the sender's pool


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame says about itself. Nothing of it is trusted before the receiver compared it with a ticket."""

    kind: Kind
    epoch: int  # of the receiver it is meant for
    seq: int
    generation: int
    index: int  # of this frame in its transfer
    block_start: int  # position in the prompt's block list, not a pool index
    num_blocks: int
    layer_start: int
    num_layers: int
    nbytes: int  # payload
    turn: int  # how often the sender used this slot before; a late copy of an earlier use carries an older one
    payload_crc: int


def write_header(slot: memoryview, header: FrameHeader) -> None:
    """Put `header` into the first HEADER_BYTES of `slot`."""
    _FIELDS.pack_into(
        slot, 0, MAGIC, VERSION, header.kind, 0, header.epoch, header.seq, header.generation, header.index,
        header.block_start, header.num_blocks, header.layer_start, header.num_layers, header.nbytes, header.turn,
        header.payload_crc,
    )  # fmt: skip
    _CRC.pack_into(slot, _FIELDS.size, crc32c(slot[: _FIELDS.size]))


def read_header(slot: memoryview) -> FrameHeader | None:
    """The header in front of `slot`, or None where it is not one: cut, foreign, of another version or damaged."""
    if len(slot) < HEADER_BYTES:
        return None
    data = memoryview(bytes(slot[:HEADER_BYTES]))  # once: the peer can write the slot all the time
    magic, version, kind, flags, *rest = _FIELDS.unpack_from(data)
    if magic != MAGIC or version != VERSION or flags != 0 or kind not in Kind._value2member_map_:
        return None
    if _CRC.unpack_from(data, _FIELDS.size)[0] != crc32c(data[: _FIELDS.size]):
        return None
    header = FrameHeader(Kind(kind), *rest)
    return header if HEADER_BYTES + header.nbytes <= len(slot) else None


def erase_header(slot: memoryview) -> None:
    """Make what `slot` holds unreadable, so that a message which wrote nothing is not taken for the one before it."""
    slot[:HEADER_BYTES] = bytes(HEADER_BYTES)


def next_turn(turn: int) -> int:
    return (turn + 1) % _TURNS


def is_older(turn: int, than: int) -> bool:
    """Whether `turn` comes before `than`, where turns wrap (serial number arithmetic, RFC 1982)."""
    return (turn - than) % _TURNS >= _TURNS // 2


def pack_credit(turn: int, accepted: bool, can_pull: bool) -> bytes:
    body = _CREDIT.pack(_CREDIT_MAGIC, turn, accepted, can_pull, 0)
    return body[:-4] + _CRC.pack(crc32c(memoryview(body)[:-4]))


def unpack_credit(data: memoryview) -> tuple[int, bool, bool] | None:
    """(turn, accepted, can_pull), or None where `data` is not a credit."""
    if len(data) != CREDIT_BYTES:
        return None
    magic, turn, accepted, can_pull, crc = _CREDIT.unpack(data)
    if magic != _CREDIT_MAGIC or accepted > 1 or can_pull > 1 or crc != crc32c(data[:-4]):
        return None
    return turn, bool(accepted), bool(can_pull)
