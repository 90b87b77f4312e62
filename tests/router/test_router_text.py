"""Text of streams: stop strings never shown, characters never cut."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.model_files import ModelFiles
from baton.v1 import serving_pb2
from router.detokenizer import StopMatcher, TextStream, TokenTable
from tests.router.router_rig import Rig, request
from tests.router.stub_worker import EOS

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # one visible character of three people, 18 bytes


def scripted(*pieces: bytes) -> TokenTable:
    """A vocabulary whose token i stands for pieces[i]."""
    return TokenTable(pieces, {})


def pieces_of(table: TokenTable, stops: Sequence[str] = (), *, cut: bool = False, min_tokens: int = 0) -> list[str]:
    stream = TextStream(table, stops, min_tokens)
    pieces = []
    for token_id in range(len(table.token_bytes)):
        pieces.append(stream.push(token_id))
        if stream.stop_match is not None:
            return pieces
    return [*pieces, stream.finish(cut=cut)]


LETTERS = scripted(b"x", b"DEF", b"G", b"HI", b"J", b"y")


def test_a_stop_string_over_several_tokens_is_never_shown() -> None:
    assert pieces_of(LETTERS, ["DEFGHIJ"]) == ["x", "", "", "", ""]


def test_text_that_turns_out_to_be_no_stop_string_is_released() -> None:
    assert pieces_of(LETTERS, ["DEFX"]) == ["x", "", "DEFG", "HI", "J", "y", ""]


def test_an_answer_that_ends_inside_a_possible_stop_string_releases_it() -> None:
    assert "".join(pieces_of(scripted(b"x", b"DEF", b"G"), ["DEFGHIJ"])) == "xDEFG"


def test_the_stop_string_that_begins_first_wins() -> None:
    matcher = StopMatcher(["later", "abc"])
    assert matcher.push("12abc later") == "12"
    assert matcher.match == "abc"


def test_of_two_stop_strings_that_end_together_the_longer_wins() -> None:
    matcher = StopMatcher(["bc", "abc"])
    assert matcher.push("xabc") == "x"
    assert matcher.match == "abc"


@given(
    st.text(alphabet="ab", max_size=40),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=1),
)
def test_the_text_shown_ends_before_the_first_complete_stop_string_wherever_tokens_end(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    ends = [(end, -len(stop)) for stop in stops for end in range(1, len(text) + 1) if text[:end].endswith(stop)]
    expected = text if not ends else text[: min(ends)[0] + min(ends)[1]]
    matcher, shown, start, cut = StopMatcher(stops), "", 0, 0
    while start < len(text) and matcher.match is None:
        shown += matcher.push(text[start : start + sizes[cut % len(sizes)]])
        start += sizes[cut % len(sizes)]
        cut += 1
        assert expected.startswith(shown)
    assert shown + (matcher.flush() if matcher.match is None else "") == expected
    assert (matcher.match is None) == (not ends)


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    table = scripted(b"stop", b" and ", b"stop", b" no")
    assert "".join(pieces_of(table, ["stop"], min_tokens=1)) == "stop and "


def test_bytes_of_one_character_wait_for_each_other() -> None:
    table = scripted(*(bytes([byte]) for byte in FAMILY.encode()))
    pieces = pieces_of(table)
    assert "".join(pieces) == FAMILY
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_by_the_limit_is_left_out_and_one_cut_by_the_model_is_marked() -> None:
    table = scripted(b"a", b"\xc3")
    assert "".join(pieces_of(table, cut=True)) == "a"
    assert "".join(pieces_of(table, cut=False)) == "a\ufffd"


@given(st.text(), st.lists(st.integers(1, 4), min_size=1), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_joined_pieces_equal_the_text_up_to_the_first_stop_however_it_is_cut(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    data = text.encode()
    cuts: list[bytes] = []
    start = 0
    while start < len(data):
        size = sizes[len(cuts) % len(sizes)]
        cuts.append(data[start : start + size])
        start += size
    joined = "".join(pieces_of(scripted(*cuts), stops))
    ends = [text.index(stop) for stop in stops if stop in text]
    # Token by token, the stop that is complete first wins; any stop's own start is an upper bound of the text shown.
    assert text.startswith(joined)
    assert joined == text if not ends else not any(stop in joined for stop in stops)


def test_a_vocabulary_of_neither_known_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="decoder"):
        TokenTable.from_tokenizer_json(json.dumps({"model": {"vocab": {"a": 0}}, "decoder": {"type": "CTC"}}), 1)


def test_sentencepiece_vocabularies_give_spaces_and_bytes() -> None:
    data = {"model": {"vocab": {"\u2581a": 0, "<0xC3>": 1, "b": 2}}, "decoder": {"type": "ByteFallback"}}
    assert list(TokenTable.from_tokenizer_json(json.dumps(data), 3).token_bytes) == [b" a", b"\xc3", b"b"]


# -- through the router, the first token from prefill and the rest from decode -----------------------------------------


async def ids_of(rig: Rig, text: str) -> list[int]:
    reply = await rig.post("/v1/tokenize", {"prompt": text})
    return [int(token_id) for token_id in reply.json()["tokens"]]


def byte_ids(files: ModelFiles, data: bytes) -> list[int]:
    """One token per byte."""
    vocabulary = json.loads(files.tokenizer_json.read_text())
    table = TokenTable.from_tokenizer_json(json.dumps(vocabulary), files.spec.vocab_size)
    return [list(table.token_bytes).index(bytes([byte])) for byte in data]


@pytest.mark.parametrize("character", [FAMILY, "é"])
async def test_a_character_split_between_prefill_and_decode_arrives_whole(
    rig: Rig, files: ModelFiles, character: str
) -> None:
    tokens = [*byte_ids(files, character.encode()), EOS]
    rig.prefill.script.tokens = rig.decode.script.tokens = tokens
    answer = await rig.generate(request(max_tokens=50))
    whole = (await rig.post("/v1/completions", {"prompt": "hello", "max_tokens": 50})).json()
    assert answer.text == whole["choices"][0]["text"] == character
    assert not any("\ufffd" in chunk.text for chunk in answer.chunks)
    assert answer.token_ids == tokens


async def test_a_stop_string_split_between_prefill_and_decode_ends_the_call_and_cancels_it(
    rig: Rig, files: ModelFiles
) -> None:
    rig.prefill.script.tokens = rig.decode.script.tokens = byte_ids(files, b"DEFGHIJy" * 20)
    made = request(max_tokens=100)
    made.stop.append("EFGHI")
    answer = await rig.generate(made)
    assert answer.text == "D"
    assert answer.done is not None
    assert answer.done.finish_reason == serving_pb2.FINISH_REASON_STOP
    assert answer.done.choices[0].stop_match == "EFGHI"
    assert answer.done.usage.completion_tokens == 6
    assert len(rig.decode.cancels) == 1
    await rig.idle()


async def test_a_tail_that_may_be_a_stop_string_is_released_at_the_limit(rig: Rig, files: ModelFiles) -> None:
    rig.prefill.script.tokens = rig.decode.script.tokens = byte_ids(files, b"xDEFG")
    body = {"prompt": "hello", "max_tokens": 5, "stop": "DEFGHIJ"}
    whole = (await rig.post("/v1/completions", body)).json()["choices"][0]
    events = await rig.events("/v1/completions", body)
    assert whole["text"] == "xDEFG"
    assert whole["finish_reason"] == "length"
    assert "".join(event["choices"][0]["text"] for event in events if "choices" in event) == "xDEFG"


async def test_text_goes_to_tokens_and_back(rig: Rig) -> None:
    text = "Numbers are 0 1 2, é and \U0001f468."
    reply = await rig.post("/v1/detokenize", {"tokens": await ids_of(rig, text)})
    assert reply.json() == {"prompt": text}
