"""Token ids of texts that mostly repeat earlier ones: a text is encoded in pieces, and pieces are kept.

Where a text may be cut is router/text_cuts.py's to know; that joined pieces have the ids of the whole follows from it. How
pieces are kept is router/session_cache.py's. Begin on the event loop, finish on any thread.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence

from tokenizers import Tokenizer as HFTokenizer

from router.session_cache import ByteBoundedLru
from router.text_cuts import TextCuts

TEXT_BYTES = 64 << 20  # 14 million characters at 4.7 bytes (measured): 140 conversations of 100k characters

TextCache = ByteBoundedLru[tuple[bytes, str], "array[int]"]  # tenant's salt, text -> ids


class PieceEncoder:
    """One tokenizer, which encodes what it has not encoded lately. Adds no special tokens around a text."""

    def __init__(self, tokenizer_json: str, max_bytes: int = TEXT_BYTES) -> None:
        self._hf = HFTokenizer.from_str(tokenizer_json)
        self._hf.no_truncation()  # a prompt that is too long is refused, never cut
        self._hf.no_padding()
        self._cuts = TextCuts(json.loads(tokenizer_json))
        self._known: TextCache = ByteBoundedLru(max_bytes)

    def begin(self, text: str, salt: bytes) -> TextTokens:
        """Find what is known; cheap, for the event loop. `salt` is the tenant's."""
        keys = [(salt, piece) for piece in self._cuts.pieces(text)]
        return TextTokens(self._hf, self._known, keys)

    def id_of(self, token: str) -> int | None:
        """None where the vocabulary has no such token."""
        token_id: int | None = self._hf.token_to_id(token)
        return token_id

    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Special tokens that the tokenizer puts before and behind a plain text."""
        bare, whole = self._hf.encode("a", add_special_tokens=False).ids, self._hf.encode("a").ids
        start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return tuple(whole[:start]), tuple(whole[start + len(bare) :])


class TextTokens:
    """A text on its way to token ids."""

    def __init__(self, hf: HFTokenizer, known: TextCache, keys: Sequence[tuple[bytes, str]]) -> None:
        self._hf = hf
        self._known = known
        self._keys = keys
        self._ids = [known.get(key) for key in keys]

    @property
    def num_chars_left(self) -> int:
        """To be encoded by `finish`."""
        return sum(len(piece) for (_, piece), ids in zip(self._keys, self._ids, strict=True) if ids is None)

    def finish(self) -> tuple[int, ...]:
        """Encode what is left and keep it. Once, on any thread."""
        token_ids: array[int] = array("I")
        for key, ids in zip(self._keys, self._ids, strict=True):
            token_ids += self._encode(key) if ids is None else ids
        return tuple(token_ids)

    def _encode(self, key: tuple[bytes, str]) -> array[int]:
        ids = array("I", self._hf.encode(key[1], add_special_tokens=False).ids)
        self._known.put(key, ids, sys.getsizeof(key[1]) + sys.getsizeof(ids))
        return ids
