"""Forms however they are cut, and what is no form."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from router.batch.multipart import MAX_FIELD_BYTES, MAX_HEAD_BYTES, MAX_PARTS, Form

TYPE = "multipart/form-data; boundary=xyz"


def read(body: bytes, content_type: str = TYPE, cut: int = 1 << 20) -> tuple[dict[str, str], str | None, bytes]:
    parts: list[bytes] = []
    form = Form(content_type, parts.append)
    for at in range(0, len(body), cut):
        form.feed(body[at : at + cut])
    form.end()
    return form.fields, form.filename, b"".join(parts)


def part(name: str, value: bytes, more: bytes = b"") -> bytes:
    head = b'--xyz\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n' % (name.encode(), more)
    return head + value + b"\r\n"


@settings(max_examples=50)
@given(
    st.binary(max_size=300) | st.lists(st.sampled_from([b"\r\n", b"--", b"\r\n--", b"x", b"\r"])).map(b"".join),
    st.integers(1, 400),
)
def test_what_a_client_sends_comes_out_whole_however_it_was_cut(content: bytes, cut: int) -> None:
    files = {"purpose": (None, b"batch"), "file": ('na"me é.jsonl', content)}
    sent = httpx.Request("POST", "http://x", files=files)
    fields, filename, read_back = read(sent.read(), sent.headers["content-type"], cut)
    assert (fields, read_back) == ({"purpose": "batch"}, content)
    assert filename is not None
    assert "é.jsonl" in filename


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (part("a", b"1"), "ends before"),
        (b"--xyz--", ""),
        (b"--xyzz\r\n", "boundary is not followed"),
        (b"--xyz\r\n\r\n\r\n--xyz--", "no name"),
        (b"--xyz\r\nX: y\r\n\r\n1\r\n--xyz--", "no name"),
        (part("a", b"1", b"\r\nContent-Transfer-Encoding: base64") + b"--xyz--", "transfer-encoding"),
        (part("a", b"1") * 2 + b"--xyz--", "a is there twice"),
        (part("a", b"1" * (MAX_FIELD_BYTES + 1)) + b"--xyz--", "longer than"),
        (b"--xyz\r\n" + b"x" * (MAX_HEAD_BYTES + 1), "bytes of headers"),
        (b"".join(part(f"f{i}", b"") for i in range(MAX_PARTS + 1)) + b"--xyz--", "parts"),
    ],
)
@pytest.mark.parametrize("cut", [1, 1 << 20])
def test_what_is_no_form_of_ours_is_refused(body: bytes, why: str, cut: int) -> None:
    if not why:
        assert read(body, cut=cut) == ({}, None, b"")
        return
    with pytest.raises(InvalidRequest, match=why):
        read(body, cut=cut)


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 71]
)
def test_a_type_without_a_usable_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidRequest, match="boundary"):
        Form(content_type, lambda data: None)
