"""Turns messages into the prompt that a chat model was trained on, with the model's own jinja template.

The template comes with the model, so it is not trusted: see router/template_sandbox.py. A template that refuses the messages
(`raise_exception`, an undefined role) is the caller's fault: InvalidRequest with the template's own words; one that cannot be
used at all is a ConfigError at start. Any thread; on the event loop with INLINE_WORK only.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError

from baton.errors import ConfigError, InvalidRequest
from router.template_sandbox import METER, Meter, OverBudget, Sandbox, charge, charge_for

__all__ = ["INLINE_WORK", "ChatTemplate", "OverBudget"]

INLINE_WORK = 500_000  # about a millisecond: what the event loop may be held up by one call
# Plus WORK_PER_CHAR for each character of the messages; real templates take 3 to 12 per character
BASE_WORK = 50_000_000
WORK_PER_CHAR = 32
MAX_RENDERED_CHARS = 16 << 20  # four times the largest body: quoting doubles, a role name per message adds
MAX_SOURCE_CHARS = 256 << 10  # the longest public ones have 30,000
MAX_REASON_CHARS = 200  # of a refusal's reason; a template may quote a whole message in it
MAX_DATE_CHARS = 64  # of strftime_now's pattern
MAX_JSON_INDENT = 16

_UNUSABLE = (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError)
_FAILED = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class _Refused(Exception):
    """The template called raise_exception."""


class ChatTemplate:
    """A compiled template; `render` is safe from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: bos_token, eos_token ... as templates name them.

        Raises:
            ConfigError: the template does not compile, or needs what chat templates may not do.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(
                f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}", field="model.path"
            )
        self._sandbox = Sandbox(raise_exception=_raise, strftime_now=_strftime_now)
        self._sandbox.filters["tojson"] = _tojson
        self._special_tokens = dict(special_tokens)
        try:
            self._template = self._sandbox.from_string(source)
        except _UNUSABLE as error:
            raise ConfigError(f"the chat template does not compile: {_short(error)}", field="model.path") from error

    def render(self, messages: Sequence[Mapping[str, str]], field: str = "messages", work: int | None = None) -> str:
        """The prompt, ready for the assistant's answer; `field` is what the caller calls the messages.

        Raises:
            InvalidRequest: the template refuses the messages, fails on them, or makes too much of them.
            OverBudget: it takes more than `work`, if given; without it may take all that such messages may.
        """
        num_chars = sum(len(message["content"]) for message in messages)
        meter = Meter(BASE_WORK + WORK_PER_CHAR * num_chars if work is None else work)
        token = METER.set(meter)
        try:
            meter.charge(self._sandbox.template_work)
            return self._rendered(messages)
        except OverBudget:
            if work is not None:
                raise
            raise _invalid("takes too long on the messages", field) from None
        except _Refused as error:
            raise _invalid(f"refuses the messages: {_short(error)}", field) from None
        except _FAILED as error:
            raise _invalid(f"fails on the messages: {_short(error)}", field) from error
        finally:
            METER.reset(token)

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> str:
        pieces: list[str] = []
        num_chars = 0
        variables = {**self._special_tokens, "messages": messages}
        for piece in self._template.generate(variables, add_generation_prompt=True):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                raise _Refused(f"the prompt exceeds {MAX_RENDERED_CHARS} characters")
        return "".join(pieces)


def _invalid(what: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"the model's chat template {what}", field=field)


def _short(error: BaseException) -> str:
    """A template's words may quote a message."""
    return str(error)[:MAX_REASON_CHARS]


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(template: str) -> str:
    if len(template) > MAX_DATE_CHARS:
        raise SecurityError(f"a date of more than {MAX_DATE_CHARS} characters")
    return datetime.datetime.now().strftime(template)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """The arguments that chat templates know from transformers."""
    if indent is not None and not 0 <= indent <= MAX_JSON_INDENT:
        raise SecurityError(f"indenting by {indent:d} columns; the limit is {MAX_JSON_INDENT}")
    charge_for(value, times=8)  # escapes, and indentation
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)
    charge(len(text))
    return text
