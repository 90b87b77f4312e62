"""Keeps what people write in chat messages from becoming the tokens that structure a conversation.

A tokenizer reads "<|im_end|>" as the end of a turn wherever it stands. The template may write it; a message may not:
    1 mask     before rendering, each special token's name inside a message is broken by a mark nobody can guess, so the
               template sees and keeps the message, and afterwards only the template's own names are whole
    2 rename   in the rendered prompt those whole names become aliases that nobody can guess either
    3 unmask   the marks are taken out again
    4 encode   by a second tokenizer that knows the special tokens by their aliases only: to it a message's "<|im_end|>"
               is ordinary text, and everything else comes out as the first tokenizer makes it
Messages without such names never come here. Tokens that a tokenizer.json does not call special (Qwen3's <think>) are
vocabulary, not structure, and stay as they are. Pure; safe from any thread.
"""

from __future__ import annotations

import functools
import json
import secrets

from router.piece_encoder import PieceEncoder

_MARK_CHARS = 8  # of 256 values each: 64 bits nobody can guess
_PRIVATE_USE = 0xE000  # Unicode's private use area, where no special token has its name


def unguessable() -> str:
    """A mark; no template filter changes it and no message contains it."""
    return "".join(chr(_PRIVATE_USE + byte) for byte in secrets.token_bytes(_MARK_CHARS))


class UntrustedText:
    """The special tokens of one tokenizer.json."""

    def __init__(self, tokenizer_json: str) -> None:
        data = json.loads(tokenizer_json)
        self._tokenizer_json = tokenizer_json
        self._ids = {added["content"]: added["id"] for added in data.get("added_tokens", []) if added["special"]}
        self._names = sorted(self._ids, key=len, reverse=True)  # a longer name may contain a shorter one
        self._beginnings = {name[:length] for name in self._names for length in range(1, len(name))}
        self._longest = max(map(len, self._names), default=0)
        self._first = {name[0] for name in self._names if name}

    def mask(self, text: str, mark: str) -> str:
        """Break every name in `text`, also one that only begins at its end; unchanged where there is none."""
        if not any(first in text for first in self._first):
            return text
        for name in self._names:
            while len(name) > 1 and name in text:  # again: a name may overlap itself
                text = text.replace(name, name[0] + mark + name[1:])
        body = text.rstrip()
        if any(body[-length:] in self._beginnings for length in range(1, self._longest)):
            text = body + mark + text[len(body) :]
        return text

    def encode(self, rendered: str, mark: str, salt: bytes = b"") -> list[int]:
        """Token ids of a rendered prompt with masked messages; whole names are the template's. `salt` is the tenant's."""
        encoder, aliases, ids = self._renamed
        for name in self._names:
            rendered = rendered.replace(name, aliases[name])
        encoded = encoder.begin(rendered.replace(mark, ""), salt).finish()
        return [ids.get(token_id, token_id) for token_id in encoded]

    @functools.cached_property
    def _renamed(self) -> tuple[PieceEncoder, dict[str, str], dict[int, int]]:
        """The second tokenizer, name -> alias, and the ids it gives to aliases -> the real ones. Made at first need."""
        aliases = {name: unguessable() for name in self._names}
        data = json.loads(self._tokenizer_json)
        for added in data["added_tokens"]:
            added["content"] = aliases.get(added["content"], added["content"])
        encoder = PieceEncoder(json.dumps(data))
        ids: dict[int, int] = {}
        for name, alias in aliases.items():
            token_id = encoder.id_of(alias)
            assert token_id is not None
            ids[token_id] = self._ids[name]
        return encoder, aliases, ids
