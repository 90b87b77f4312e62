"""Streams of server-sent events: whichever way a token takes to the client, its bytes are the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import WorkerLost
from baton.request import FinishReason, Logprobs
from baton.timings import Timings
from router.call_events import CallDone, Usage
from router.detokenizer import TextStream, TokenTable
from router.openai_replies import ChatReply, CompletionReply, Wording
from router.sse import MARK, SseStream

FAMILY = "\U0001f468\u200d\U0001f469".encode()
WORDS = (b" the", b"", b'"', b"\\n", b"\n\x07", "\u00e9".encode(), b"stop", b"st", b"op", b" now")
PIECES = (*WORDS, *(bytes([byte]) for byte in FAMILY), b"\xff")
TABLE = TokenTable(PIECES, {1: b"<eos>"})
CREATED = re.compile(rb'(?<="created":)\d{10}')


@dataclass
class FakeExchange:
    """A client that may fall behind and keeps what it got."""

    chunked: bool = True
    behind: bool = False
    gone: bool = False
    ended: bool = False
    cut_off: bool = False
    writes: list[bytes] = field(default_factory=list)
    on_pace: Callable[[], object] = lambda: None
    next_turn: list[Callable[[], object]] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        assert not self.ended
        self.writes.append(data)

    def head(self, status: int, fields: bytes) -> bytes:
        return b"HEAD %d\r\n\r\n" % status

    def end(self) -> None:
        self.ended = True

    def cut(self) -> None:
        self.cut_off = True

    def soon(self, callback: Callable[[], object]) -> None:
        self.next_turn.append(callback)

    def when_pace_changes(self, on_pace: Callable[[], object]) -> None:
        self.on_pace = on_pace

    def set_behind(self, behind: bool) -> None:
        self.behind = behind
        self.on_pace()

    @property
    def body(self) -> bytes:
        """What a client reads, without the head."""
        head, _, body = b"".join(self.writes).partition(b"\r\n\r\n")
        assert head == b"HEAD 200"
        return body


@dataclass(frozen=True)
class Answer:
    """What workers say, and how it is wanted."""

    chat: bool
    tokens: tuple[tuple[int, int], ...]  # (choice, token id) as they come
    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: bool = False
    token_ids: bool = False
    last: FinishReason = FinishReason.LENGTH

    def run(
        self, exchange: FakeExchange, *, uniform: bool, paces: frozenset[int] = frozenset(), max_bytes: int = 1 << 20
    ) -> SseStream:  # fmt: skip
        """`paces`: tokens before which the client falls behind, or catches up."""
        kind = ChatReply if self.chat else CompletionReply
        reply = kind(Wording("id", "model", "default", lambda: "f" * 32, self.token_ids), TABLE)
        stream = SseStream(exchange, "id", reply, TABLE, max_bytes, uniform)  # type: ignore[arg-type]  # a fake
        num_choices = 1 + max(choice for choice, _ in self.tokens)
        texts = [TextStream(TABLE, self.stops, self.min_tokens) for _ in range(num_choices)]
        sinks = [stream.choice(choice, text) for choice, text in enumerate(texts)]
        counts = [0] * num_choices
        stopped: set[int] = set()
        for place, (choice, token_id) in enumerate(self.tokens):
            if place in paces:
                exchange.set_behind(not exchange.behind)
            if choice not in stopped:
                logprobs = Logprobs(-0.5, (token_id,), (-0.5,)) if self.logprobs else None
                is_last = all(later != choice for later, _ in self.tokens[place + 1 :])
                finish = self.last if is_last else FinishReason.NONE
                if sinks[choice].token(counts[choice], token_id, finish, logprobs):
                    stopped.add(choice)
                counts[choice] += 1
        for choice, sink in enumerate(sinks):
            sink.end(FinishReason.STOP if choice in stopped else self.last)
        stream.finish(CallDone(Usage(3, len(self.tokens), 0), Timings()), include_usage=True)
        return stream

    def body(self, *, uniform: bool) -> bytes:
        exchange = FakeExchange()
        self.run(exchange, uniform=uniform)
        assert exchange.ended
        return CREATED.sub(b"1" * 10, exchange.body)


answers = st.builds(
    Answer,
    chat=st.booleans(),
    tokens=st.lists(st.tuples(st.integers(0, 1), st.integers(0, len(PIECES) - 1)), min_size=1, max_size=30).map(tuple),
    stops=st.lists(st.sampled_from(["stop", "top n", "\u00e9"]), max_size=2, unique=True).map(tuple),
    min_tokens=st.integers(0, 3),
    last=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)


def events_of(body: bytes) -> list[dict[str, object]]:
    """Take the chunks apart, then the events."""
    data = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        data, body = data + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return events_in(data)


def events_in(data: bytes) -> list[dict[str, object]]:
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def said(events: list[dict[str, object]]) -> dict[int, tuple[str, list[int], object]]:
    """By choice: text, token ids, finish reason."""
    texts: dict[int, tuple[str, list[int], object]] = {}
    for event in events:
        for choice in event["choices"]:  # type: ignore[attr-defined]
            text, ids, finish = texts.get(choice["index"], ("", [], None))
            more = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            assert finish is None
            texts[choice["index"]] = (text + more, ids + choice.get("token_ids", []), choice["finish_reason"])
    return texts


@settings(deadline=None)
@given(answers)
def test_chunks_put_together_from_tables_are_the_bytes_of_chunks_made_one_by_one(answer: Answer) -> None:
    assert answer.body(uniform=True) == answer.body(uniform=False)


@settings(deadline=None)
@given(answers, st.frozensets(st.integers(0, 29)), st.booleans(), st.booleans())
def test_a_client_that_falls_behind_gets_the_same_texts_ids_and_ends(
    answer: Answer, paces: frozenset[int], logprobs: bool, token_ids: bool
) -> None:
    rich = Answer(answer.chat, answer.tokens, answer.stops, answer.min_tokens, logprobs, token_ids, answer.last)
    steady, unsteady = FakeExchange(), FakeExchange()
    uniform = not logprobs and not token_ids
    rich.run(steady, uniform=uniform)
    rich.run(unsteady, uniform=uniform, paces=paces)
    assert said(events_of(unsteady.body)) == said(events_of(steady.body))


@settings(deadline=None)
@given(answers)
def test_an_http_1_0_client_gets_the_events_without_chunks(answer: Answer) -> None:
    old = FakeExchange(chunked=False)
    answer.run(old, uniform=True)
    assert said(events_in(old.body)) == said(events_of(answer.body(uniform=True)))


def test_the_usual_token_is_one_write_and_so_are_head_and_first_token_and_all_that_ends_the_answer() -> None:
    exchange = FakeExchange()
    Answer(chat=True, tokens=tuple((0, 0) for _ in range(10))).run(exchange, uniform=True)
    assert len(exchange.writes) == 10
    assert exchange.writes[0].startswith(b"HEAD")
    assert exchange.writes[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_last_token_whose_end_does_not_come_at_once_does_not_wait_for_it() -> None:
    exchange = FakeExchange()
    reply = CompletionReply(Wording("id", "model", "default", lambda: "f" * 32), TABLE)
    stream = SseStream(exchange, "id", reply, TABLE, 1 << 20, True)  # type: ignore[arg-type]  # a fake
    sink = stream.choice(0, TextStream(TABLE))
    sink.token(0, 0, FinishReason.NONE, None)
    sink.token(1, 9, FinishReason.LENGTH, None)
    assert b" now" not in b"".join(exchange.writes)
    for callback in exchange.next_turn:
        callback()
    assert b" now" in exchange.writes[-1]
    sink.end(FinishReason.LENGTH)
    stream.finish(CallDone(Usage(1, 2, 0), Timings()), include_usage=False)
    assert said(events_of(exchange.body)) == {0: (" the now", [], "length")}


def test_a_client_that_leaves_more_waiting_than_it_may_is_cut_off() -> None:
    exchange = FakeExchange()
    answer = Answer(chat=False, tokens=tuple((0, 0) for _ in range(100)))
    answer.run(exchange, uniform=True, paces=frozenset({3}), max_bytes=10_000)
    assert exchange.cut_off


def test_nothing_is_written_to_a_client_that_left() -> None:
    exchange = FakeExchange(gone=True)
    Answer(chat=False, tokens=((0, 0), (0, 0))).run(exchange, uniform=True)
    assert exchange.writes == []


def test_an_error_behind_the_first_token_is_the_last_event_and_no_done_follows() -> None:
    exchange = FakeExchange()
    reply = CompletionReply(Wording("id", "model", "default", lambda: "f" * 32), TABLE)
    stream = SseStream(exchange, "id", reply, TABLE, 1 << 20, True)  # type: ignore[arg-type]  # a fake
    stream.choice(0, TextStream(TABLE)).token(0, 0, FinishReason.NONE, None)
    stream.fail(WorkerLost("gone"))
    assert exchange.ended
    assert b'"code":"worker_lost"' in exchange.writes[-1]
    assert b"[DONE]" not in b"".join(exchange.writes)


@pytest.mark.parametrize("chat", [True, False])
def test_a_model_whose_name_holds_the_mark_is_served_the_slow_way(chat: bool) -> None:
    exchange = FakeExchange()
    kind = ChatReply if chat else CompletionReply
    reply = kind(Wording("id", MARK, "default", lambda: "f" * 32), TABLE)
    stream = SseStream(exchange, "id", reply, TABLE, 1 << 20, True)  # type: ignore[arg-type]  # a fake
    sink = stream.choice(0, TextStream(TABLE))
    for index in range(5):
        sink.token(index, 0, FinishReason.LENGTH if index == 4 else FinishReason.NONE, None)
    sink.end(FinishReason.LENGTH)
    stream.finish(CallDone(Usage(1, 5, 0), Timings()), include_usage=False)
    events = events_of(exchange.body)
    assert said(events)[0][0] == " the" * 5
    assert all(event["model"] == MARK for event in events)
