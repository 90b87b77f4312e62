"""From token ids to text, piece by piece: UTF-8 that is never cut, and stop strings that are never shown.

`TokenTable` says which bytes each token stands for (special tokens stand for none). `TextStream` turns one sequence's
tokens into text:
    bytes -> characters   bytes of an unfinished character wait for the rest; U+FFFD appears only where the model itself
                          wrote bytes that are no UTF-8. A character cut by max_tokens or a stop string is left out of
                          the text (its token ids are still reported); one cut by the model's own end of text is U+FFFD.
    characters -> text    the longest tail that may be the start of a stop string waits; it is released as soon as it
                          cannot be one, and at the end
Joined pieces equal the text of a unary answer because both come from here. Stop strings are looked for behind the first
`min_tokens` tokens only. Pure; one object per sequence.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from baton.errors import ConfigError
from baton.request import FinishReason


def _byte_level_alphabet() -> dict[str, int]:
    """Characters that byte-level BPE vocabularies write for bytes. Source: GPT-2's encoder.py, bytes_to_unicode."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + rank): byte for rank, byte in enumerate(hidden)})
    return alphabet


_ALPHABET = _byte_level_alphabet()
_SPACE_MARK = "\u2581"  # SentencePiece's visible space


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Bytes of every token id; b"" for special ones and for holes in the vocabulary. Indexed by token id."""

    token_bytes: Sequence[bytes]
    special_bytes: Mapping[int, bytes]  # what a special token is called, for logprobs
    texts: Sequence[str | None] = field(init=False)  # None = no whole characters
    json_texts: Sequence[bytes | None] = field(init=False)  # the same as the inside of a JSON string
    longest_json: int = field(init=False)  # bytes of the longest of them
    longest: int = field(init=False)  # bytes of the longest token: no text of B bytes has fewer than B / longest tokens

    def __post_init__(self) -> None:
        texts = [_whole_characters(token) for token in self.token_bytes]
        json_texts = [None if text is None else json_inside(text) for text in texts]
        object.__setattr__(self, "texts", texts)
        object.__setattr__(self, "json_texts", json_texts)
        object.__setattr__(self, "longest_json", max((len(text) for text in json_texts if text), default=0))
        object.__setattr__(self, "longest", max(map(len, self.token_bytes), default=1) or 1)

    @classmethod
    def from_tokenizer_json(cls, text: str, vocab_size: int) -> TokenTable:
        """Read vocabulary, added tokens and decoder of a tokenizer.json.

        Raises:
            ConfigError: a decoder that is neither byte-level nor SentencePiece-like.
        """
        data = json.loads(text)
        to_bytes = _byte_level if _uses(data.get("decoder"), "ByteLevel") else _sentence_piece
        if to_bytes is _sentence_piece and not _uses(data.get("decoder"), "ByteFallback", "Metaspace", "Replace"):
            raise ConfigError("tokenizer.json has a decoder that is neither byte-level nor SentencePiece-like",
                              field="model.path")  # fmt: skip
        table = [b""] * vocab_size
        for token, token_id in _vocab_items(data["model"]["vocab"]):
            if token_id < vocab_size:
                table[token_id] = to_bytes(token)
        special: dict[int, bytes] = {}
        for added in data.get("added_tokens", []):
            if added["id"] < vocab_size:
                content = added["content"].encode()
                table[added["id"]] = b"" if added["special"] else content
                if added["special"]:
                    special[added["id"]] = content
        return cls(table, special)

    def name(self, token_id: int) -> bytes:
        """The bytes to show for a token in a list of logprobs."""
        return self.special_bytes.get(token_id) or self.token_bytes[token_id]


def json_inside(text: str) -> bytes:
    """What stands between the quotes of a JSON string."""
    return orjson.dumps(text)[1:-1]


def _whole_characters(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


def _vocab_items(vocab: object) -> list[tuple[str, int]]:
    """BPE and WordPiece keep a map, Unigram a list of [token, score]."""
    if isinstance(vocab, dict):
        return [(str(token), int(token_id)) for token, token_id in vocab.items()]
    assert isinstance(vocab, list)
    return [(str(entry[0]), token_id) for token_id, entry in enumerate(vocab)]


def _uses(decoder: object, *kinds: str) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") in kinds or any(_uses(part, *kinds) for part in decoder.get("decoders", []))


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:  # an added token outside the alphabet stands for itself
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE_MARK, " ").encode()


@functools.lru_cache(maxsize=1_024)  # choices of one call, and calls of one client, share their stop strings
def _borders(stop: str) -> tuple[int, ...]:
    """For each beginning of `stop`, the length of its longest proper beginning that is also its end.

    Source: Knuth, Morris, Pratt, "Fast pattern matching in strings", 1977.
    """
    borders = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[position] != stop[length]:
            length = borders[length - 1]
        length += stop[position] == stop[length]
        borders[position] = length
    return tuple(borders)


class StopMatcher:
    """Holds back what may become a stop string. The one that is complete first wins, the longest of several, however the
    text is cut into tokens; the work per character does not grow with the stop strings' lengths."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._first = frozenset(stop[0] for stop in stops)
        self._matched = [0] * len(stops)  # characters at the end of the text that begin each stop string
        self._held = ""
        self.match: str | None = None

    def push(self, text: str) -> str:
        """The text that is now safe to show; sets `match` when a stop string is complete."""
        if not self._held and self._first.isdisjoint(text):
            return text
        for position, character in enumerate(text, start=1):
            if complete := self._advance(character):
                self.match = max(complete, key=len)
                return (self._held + text[:position])[: -len(self.match)]
        text = self._held + text
        num_safe = len(text) - max(self._matched)
        self._held = text[num_safe:]
        return text[:num_safe]

    def flush(self) -> str:
        """The end: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> list[str]:
        """Take one character in; returns the stop strings that end with it."""
        complete = []
        for rank, (stop, borders) in enumerate(self._stops):
            matched = self._matched[rank]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            self._matched[rank] = matched
            if matched == len(stop):
                complete.append(stop)
        return complete


class TextStream:
    """One sequence's text. Push tokens in order, then finish once."""

    def __init__(self, table: TokenTable, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._table = table
        self._mid_character = False  # bytes wait in the decoder
        self._stops = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.match if self._stops is not None else None

    @property
    def is_plain(self) -> bool:
        """The next token's text is the table's own, if that is one of whole characters; pushing it would change nothing."""
        return self._stops is None and not self._mid_character

    @functools.cached_property
    def _utf8(self) -> codecs.IncrementalDecoder:
        """Made for texts that need it: most have tokens of whole characters only."""
        return codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int, finish: FinishReason = FinishReason.NONE) -> str:
        """The text that this token makes certain; perhaps none: one that ends the text (EOS, a stop token) has none."""
        if finish is FinishReason.STOP:
            return ""
        text = None if self._mid_character else self._table.texts[token_id]
        if text is None:
            text = self._utf8.decode(self._table.token_bytes[token_id])
            self._mid_character = bool(self._utf8.getstate()[0])
        if self._stops is None:
            return text
        self._num_tokens += 1
        return text if self._num_tokens <= self._min_tokens else self._stops.push(text)

    def finish(self, *, cut: bool) -> str:
        """Release what waits. `cut`: the model had more to say, so an unfinished character is left out."""
        if self.stop_match is not None:
            return ""
        unfinished = self._utf8.decode(b"", final=True) if self._mid_character and not cut else ""
        if self._stops is None:
            return unfinished
        safe = self._stops.push(unfinished) if unfinished else ""
        return safe if self.stop_match is not None else safe + self._stops.flush()
