"""A call's answer as server-sent events, written token by token without a task switch.

    not begun   nothing is written, so an error can still be an HTTP status; the head goes out with the first token, and the
                last token with the end of the answer, if that comes in the same turn of the loop
    fast        a token of whole characters becomes a chunk by joining byte strings: the chunk's beginning and end, built
                once per choice out of the reply's own JSON, around the token's text as the table has it
    slow        everything else, by the same reply: the first token and the last, logprobs, token ids, and text that the
                TextStream holds back or puts together
    behind      the client does not keep up: events wait here, bounded, and go out merged when it has caught up; a client
                that lets more than the bound wait is cut off
Whichever way tokens go, the events' texts joined are the same, and so are their bytes where nothing was merged. Never
blocks, never awaits. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson

from baton.errors import BatonError
from baton.request import FinishReason, Logprobs
from router.asgi import error_body, explanation_field, request_id_field
from router.call_events import CallDone, ChoiceFinished, Piece, Pieces, PieceSink, Queued, Taken, memory_bytes, merged
from router.detokenizer import TextStream, TokenTable, json_inside
from router.http_protocol import Exchange
from router.openai_replies import Reply

HEAD = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
MARK = "\ue000text\ue000"  # private characters: where a token's text goes in the chunk that is built once
_JSON_MARK = json_inside(MARK)
MAX_FAST_BYTES = 4_096  # of a chunk: eight times a usual one; longer ones go the slow way
SIZE_LINES = tuple(b"%x\r\n" % nbytes for nbytes in range(MAX_FAST_BYTES))


class SseStream:
    """One call's events; an Audience. `begun`: the status is sent, so errors must be events from now on.

    `uniform`: the chunks of a choice, but for the first, differ in their text only.
    """

    def __init__(
        self,
        exchange: Exchange,
        request_id: str,
        reply: Reply,
        table: TokenTable,
        max_backlog_bytes: int,
        uniform: bool,
        explanation: Callable[[], str] = str,
    ) -> None:
        """`explanation`: of where the answer is made, once that is known; "" = nobody asked."""
        self.begun = False
        self.reply = reply
        self.table = table
        self.uniform = uniform and exchange.chunked  # so that they can be put together instead of made
        self.exchange = exchange
        self._request_id = request_id
        self._explanation = explanation
        self._choices: list[SseChoice] = []
        self._num_open = 0  # of them
        self._backlog: list[Queued] = []
        self._backlog_bytes = 0
        self._max_backlog_bytes = max_backlog_bytes
        exchange.when_pace_changes(self._pace_changed)

    @property
    def flows(self) -> bool:
        """What is written now goes out."""
        return self.begun and not self.exchange.behind and not self.exchange.gone

    def choice(self, choice: int, text: TextStream) -> SseChoice:
        sink = SseChoice(self, choice, text)
        self._choices.append(sink)
        self._num_open += 1
        return sink

    def put(self, event: Piece | ChoiceFinished) -> None:
        """Write the event, now or with what is about to follow it."""
        if isinstance(event, ChoiceFinished):
            self._num_open -= 1
            waits = not self._num_open or bool(self._backlog)
        elif event.token is None:
            waits = bool(self._backlog)  # behind the choice's last token
        elif waits := event.token.finish is not FinishReason.NONE and not self.exchange.behind:
            self.exchange.soon(self._flush)  # the end mostly comes in the worker's same message
        if waits or self.exchange.behind:
            self._wait(event)
        else:
            self._write(self._event(event if isinstance(event, ChoiceFinished) else Pieces(event.choice, (event,))))

    def finish(self, done: CallDone, include_usage: bool) -> None:
        """The last events. What the client has not taken by then waits in the connection's buffer, bounded like here."""
        usage = as_event(self.reply.usage(done)) if include_usage else b""
        self._write(self._take_backlog() + usage + DONE, last=True)

    def fail(self, error: BatonError) -> None:
        """Say why the stream ends here, without [DONE]."""
        self._write(self._take_backlog() + as_event(error_body(error)), last=True)

    def _flush(self) -> None:
        if self._backlog and not self.exchange.behind:
            self._write(self._take_backlog())

    def _pace_changed(self) -> None:
        self._flush()
        for choice in self._choices:
            choice.choose_way()

    def _wait(self, event: Piece | ChoiceFinished) -> None:
        self._backlog.append(event)
        self._backlog_bytes += memory_bytes(event)
        if self._backlog_bytes > self._max_backlog_bytes:
            self.exchange.cut()

    def _take_backlog(self) -> bytes:
        waiting, self._backlog, self._backlog_bytes = self._backlog, [], 0
        return b"".join([self._event(event) for event in merged(waiting)])

    def _event(self, event: Taken) -> bytes:
        match event:
            case Pieces():
                return as_event(self.reply.pieces(event))
            case ChoiceFinished():
                return as_event(self.reply.end(event))
        raise AssertionError(f"{event} does not wait here")

    def _write(self, events: bytes, *, last: bool = False) -> None:
        exchange = self.exchange
        if exchange.gone:
            return
        data = events
        if exchange.chunked:
            data = b"%x\r\n%b\r\n%b" % (len(events), events, LAST_CHUNK if last else b"")
        if not self.begun:
            self.begun = True
            data = exchange.head(200, self._fields()) + data
        exchange.write(data)
        if last:
            exchange.end()

    def _fields(self) -> bytes:
        return (
            HEAD
            + request_id_field(self._request_id)
            + explanation_field(self._explanation())
            + (b"transfer-encoding: chunked\r\n" if self.exchange.chunked else b"")
        )


class SseChoice:
    """One choice's tokens; a ChoiceSink."""

    def __init__(self, stream: SseStream, choice: int, text: TextStream) -> None:
        self._stream = stream
        self._choice = choice
        self._text = text
        self._pieces = PieceSink(choice, text, stream.put)
        self._json_texts = stream.table.json_texts
        self._write: Callable[[bytes], None] = stream.exchange.write
        self._fast = False
        self._begun = False  # its first token, which no other is like, was taken
        self._begin = self._end = b""  # of each chunk, without its size line; b"" = not made, or chunks are not uniform
        self._fixed_bytes = 0  # of both, without the chunk's own end of line

    def token(self, index: int, token_id: int, finish: FinishReason, logprobs: Logprobs | None) -> bool:
        if not self._fast or finish or (text := self._json_texts[token_id]) is None:
            return self._any_token(index, token_id, finish, logprobs)
        self._write(b"".join((SIZE_LINES[self._fixed_bytes + len(text)], self._begin, text, self._end)))
        return False

    def end(self, finish: FinishReason) -> None:
        self._pieces.end(finish)

    def choose_way(self) -> None:
        """Called when something changed that the fast way depends on."""
        self._fast = bool(self._begin) and self._stream.flows and self._text.is_plain

    def _any_token(self, index: int, token_id: int, finish: FinishReason, logprobs: Logprobs | None) -> bool:
        stream = self._stream
        if self._begun and not finish and stream.uniform and stream.flows and (self._begin or self._has_frame()):
            text = json_inside(self._text.push(token_id, finish))
            self._write(b"".join((b"%x\r\n" % (self._fixed_bytes + len(text)), self._begin, text, self._end)))
        else:
            self._pieces.token(index, token_id, finish, logprobs)
        self._begun = True
        self.choose_way()
        return self._text.stop_match is not None

    def _has_frame(self) -> bool:
        """Whether there is a chunk to put texts in; made once, as the reply makes any, and cut where the text is."""
        if not self._begin:
            stream = self._stream
            chunk = as_event(stream.reply.pieces(Pieces(self._choice, (Piece(self._choice, MARK, None),))))
            begin, _, end = chunk.partition(_JSON_MARK)
            self._fixed_bytes = len(begin) + len(end)
            stream.uniform = _JSON_MARK not in end and self._fixed_bytes + stream.table.longest_json < MAX_FAST_BYTES
            if stream.uniform:
                self._begin, self._end = begin, end + b"\r\n"
        return bool(self._begin)


def as_event(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
