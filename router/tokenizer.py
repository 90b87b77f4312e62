"""Text to token ids, off the event loop: a few threads, since 16k characters take 8 ms (DESIGN section 8).

The tokenizers library releases the GIL while it encodes. A text so long that it cannot fit is refused before it is
tokenised, by the length of the longest token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tokenizers import Tokenizer as HFTokenizer

from baton.errors import InvalidRequest
from router.chat_template import ChatTemplate
from router.detokenizer import TokenTable
from router.untrusted_text import UntrustedText, unguessable

NUM_THREADS = 2  # one long prompt must not hold up every short one


class Tokenizer:
    """One model's tokenizer and chat template."""

    def __init__(self, tokenizer_json: str, table: TokenTable, template: ChatTemplate | None) -> None:
        self.table = table
        self._longest_token_bytes = table.longest
        self._hf = HFTokenizer.from_str(tokenizer_json)
        self._template = template
        self._untrusted = UntrustedText(tokenizer_json)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, field: str, max_tokens: int) -> tuple[int, ...]:
        """Token ids of plain text, with the special tokens the model wants around it; names of special tokens inside are
        special tokens, since a prompt is the caller's own to structure.

        Raises:
            InvalidRequest: it has more than `max_tokens` tokens for certain (a shorter one may still be too long).
        """
        return await self._run(lambda: self._encode(text, field, max_tokens, add_special_tokens=True))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, field: str, max_tokens: int
    ) -> tuple[int, ...]:
        """Token ids of a conversation; the template alone places special tokens, whatever the messages contain.

        Raises:
            InvalidRequest: no template, a refusal of the template, or too long for certain.
        """
        template = self._template
        if template is None:
            raise InvalidRequest("the model has no chat template; use a prompt or token ids", field=field)

        def work() -> tuple[int, ...]:
            mark = unguessable()
            masked = [{**message, "content": self._untrusted.mask(message["content"], mark)} for message in messages]
            rendered = template.render(masked, field)
            if masked == list(messages):
                return self._encode(rendered, field, max_tokens, add_special_tokens=False)
            self._check_length(rendered.replace(mark, ""), field, max_tokens)
            return tuple(self._untrusted.encode(rendered, mark))

        return await self._run(work)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of whole answers and of /v1/detokenize; equal to the joined pieces of a stream."""
        return b"".join([self.table.token_bytes[token_id] for token_id in token_ids]).decode(errors="replace")

    def _encode(self, text: str, field: str, max_tokens: int, *, add_special_tokens: bool) -> tuple[int, ...]:
        self._check_length(text, field, max_tokens)
        return tuple(self._hf.encode(text, add_special_tokens=add_special_tokens).ids)

    def _check_length(self, text: str, field: str, max_tokens: int) -> None:
        at_least = len(text.encode()) // self._longest_token_bytes
        if at_least > max_tokens:
            raise InvalidRequest(
                f"{field} has at least {at_least} tokens; the limit is {max_tokens}", field=field
            )  # fmt: skip

    async def _run(self, work: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
