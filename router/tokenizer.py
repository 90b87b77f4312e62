"""Text to token ids, without holding up the event loop: 16k characters take 8 ms (DESIGN section 8).

What was tokenised lately is kept (router/session_cache.py). A little that is left is encoded at once; more goes to a few
threads, where the tokenizers library releases the GIL. So does a chat template that takes its time. A text so long that it
cannot fit is refused before it is tokenised, by the length of the longest token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.errors import InvalidRequest
from router.chat_template import INLINE_WORK, ChatTemplate, OverBudget
from router.detokenizer import TokenTable
from router.piece_encoder import PieceEncoder
from router.untrusted_text import UntrustedText, unguessable

NUM_THREADS = 2  # one long prompt must not hold up every short one
# Encoded on the event loop: 0.2 ms, about what the way to a thread and back takes (measured: 35 us of CPU, 170 us in all).
INLINE_CHARS = 512
LOOK_UP_CHARS = 256 << 10  # longer texts are looked up on a thread too: 256 pieces take 0.5 ms. measured: docs/api.md
MAX_CHAR_BYTES = 4  # UTF-8

Result = TypeVar("Result")


class Tokenizer:
    """One model's tokenizer and chat template. `salt` is the tenant's: what one had tokenised is nobody else's to find."""

    def __init__(self, tokenizer_json: str, table: TokenTable, template: ChatTemplate | None) -> None:
        self.table = table
        self._longest_token_bytes = table.longest
        self._encoder = PieceEncoder(tokenizer_json)
        self._before, self._behind = self._encoder.around()
        self._template = template
        self._untrusted = UntrustedText(tokenizer_json)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, field: str, max_tokens: int, salt: bytes = b"") -> tuple[int, ...]:
        """Token ids of plain text, with the special tokens the model wants around it; names of special tokens inside are
        special tokens, since a prompt is the caller's own to structure.

        Raises:
            InvalidRequest: it has more than `max_tokens` tokens for certain (a shorter one may still be too long).
        """
        return self._before + await self._encode(text, field, max_tokens, salt) + self._behind

    async def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, field: str, max_tokens: int, salt: bytes = b""
    ) -> tuple[int, ...]:
        """Token ids of a conversation; the template alone places special tokens, whatever the messages contain.

        Raises:
            InvalidRequest: no template, a refusal of the template, or too long for certain.
        """
        template, mark = self._template, unguessable()
        if template is None:
            raise InvalidRequest("the model has no chat template; use a prompt or token ids", field=field)
        masked = [{**message, "content": self._untrusted.mask(message["content"], mark)} for message in messages]
        try:
            rendered = template.render(masked, field, INLINE_WORK)
        except OverBudget:
            rendered = await self._on_thread(lambda: template.render(masked, field))
        if masked == messages:
            return await self._encode(rendered, field, max_tokens, salt)
        self._check_length(rendered.replace(mark, ""), field, max_tokens)
        return tuple(await self._on_thread(lambda: self._untrusted.encode(rendered, mark, salt)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of whole answers and of /v1/detokenize; equal to the joined pieces of a stream."""
        return b"".join([self.table.token_bytes[token_id] for token_id in token_ids]).decode(errors="replace")

    async def _encode(self, text: str, field: str, max_tokens: int, salt: bytes) -> tuple[int, ...]:
        self._check_length(text, field, max_tokens)
        if len(text) > LOOK_UP_CHARS:
            return await self._on_thread(lambda: self._encoder.begin(text, salt).finish())
        tokens = self._encoder.begin(text, salt)
        return tokens.finish() if tokens.num_chars_left <= INLINE_CHARS else await self._on_thread(tokens.finish)

    def _check_length(self, text: str, field: str, max_tokens: int) -> None:
        if len(text) * MAX_CHAR_BYTES <= max_tokens * self._longest_token_bytes:
            return
        at_least = len(text.encode()) // self._longest_token_bytes
        if at_least > max_tokens:
            raise InvalidRequest(f"{field} has at least {at_least} tokens; the limit is {max_tokens}", field=field)

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
