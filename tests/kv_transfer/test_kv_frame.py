"""Headers: what is written is read back, and nothing else is ever taken for a header."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from baton.kv_copy import crc32c
from kv_transfer.frame import (
    CREDIT_BYTES,
    HEADER_BYTES,
    FrameHeader,
    Kind,
    erase_header,
    pack_credit,
    read_header,
    unpack_credit,
    write_header,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    FrameHeader, st.sampled_from(Kind), U64, U64, U32, U32, U32, U32, U32, U32, st.integers(0, 100), U32, U32
)


def slot_with(header: FrameHeader) -> bytearray:
    slot = bytearray(HEADER_BYTES + 100)
    write_header(memoryview(slot), header)
    return slot


@given(HEADERS)
def test_a_header_is_read_back_as_it_was_written(header: FrameHeader) -> None:
    assert read_header(memoryview(slot_with(header))) == header


@given(HEADERS, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_header_with_one_changed_byte_is_refused(header: FrameHeader, place: int, change: int) -> None:
    slot = slot_with(header)
    slot[place] ^= change
    assert read_header(memoryview(slot)) is None


@given(st.binary(max_size=200))
def test_random_bytes_are_never_a_header(data: bytes) -> None:
    assert read_header(memoryview(bytearray(data))) is None


@given(HEADERS, st.integers(0, HEADER_BYTES + 99))
def test_a_slot_shorter_than_its_frame_is_refused(header: FrameHeader, length: int) -> None:
    short = memoryview(slot_with(header))[:length]
    assert (read_header(short) is not None) == (length >= HEADER_BYTES + header.nbytes)


@given(HEADERS)
def test_an_erased_slot_holds_no_header(header: FrameHeader) -> None:
    slot = slot_with(header)
    erase_header(memoryview(slot))
    assert read_header(memoryview(slot)) is None


def test_the_layout_on_the_wire_is_fixed() -> None:
    header = FrameHeader(Kind.DATA, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    slot = slot_with(header)
    assert slot[:4] == b"BKV1"
    assert struct.unpack_from("<HBBQQ9I", slot, 4) == (2, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)


def test_the_checksum_is_crc32c() -> None:
    assert crc32c(memoryview(bytearray(b"123456789"))) == 0xE3069283  # RFC 3720 appendix B.4's polynomial, check value


@given(U32, st.booleans())
def test_a_credit_is_read_back_as_it_was_written(turn: int, accepted: bool) -> None:
    assert unpack_credit(memoryview(pack_credit(turn, accepted, not accepted))) == (turn, accepted, not accepted)


@given(U32, st.booleans(), st.integers(0, CREDIT_BYTES - 1), st.integers(1, 255))
def test_a_credit_with_one_changed_byte_is_refused(turn: int, accepted: bool, place: int, change: int) -> None:
    data = bytearray(pack_credit(turn, accepted, True))
    data[place] ^= change
    assert unpack_credit(memoryview(data)) is None


@given(st.binary(max_size=40))
def test_random_bytes_are_never_a_credit(data: bytes) -> None:
    assert unpack_credit(memoryview(data)) is None
