"""Turns messages into the prompt that a chat model was trained on, with the model's own jinja template.

The template comes with the model, so it is not trusted: an immutable sandbox, no loader, bounded loops, bounded products
and a bounded result. A template that refuses the messages (`raise_exception`, an undefined role) is the caller's fault:
InvalidRequest with the template's own words. Runs on a tokeniser thread.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import ConfigError, InvalidRequest

MAX_LOOPS = 100_000  # steps of all ranges in one rendering; messages of one call are far fewer (router/validate.py)
MAX_PRODUCT_CHARS = 1 << 20  # the largest string a template may build by repetition
MAX_RENDERED_CHARS = 16 << 20  # four times the largest body: quoting doubles, a role name per message adds

MAX_REASON_CHARS = 200  # of a refusal's reason; a template may quote a whole message in it


class _Refused(Exception):
    """The template called raise_exception."""


class _Loops:
    """The ranges of one rendering; nested ones add up, so that their product is bounded too."""

    def __init__(self) -> None:
        self._left = MAX_LOOPS

    def range(self, *args: int) -> range:
        steps = range(*args)
        self._left -= len(steps)
        if self._left < 0:
            raise jinja2.exceptions.SecurityError(f"it loops over more than {MAX_LOOPS} numbers")
        return steps


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses what could take memory or time out of proportion to the messages."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.exceptions.SecurityError("powers are not allowed in chat templates")
        for text, times in ((left, right), (right, left)):
            if isinstance(text, Sequence) and isinstance(times, int) and len(text) * times > MAX_PRODUCT_CHARS:
                raise jinja2.exceptions.SecurityError(f"repetition makes more than {MAX_PRODUCT_CHARS} characters")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A compiled template; `render` is safe from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: bos_token, eos_token ... as templates name them.

        Raises:
            ConfigError: the template does not compile.
        """
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        environment.filters["tojson"] = _tojson
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template does not compile: {error}", field="model.path") from error

    def render(self, messages: Sequence[Mapping[str, str]], field: str = "messages") -> str:
        """The prompt, ready for the assistant's answer; `field` is what the caller calls the messages.

        Raises:
            InvalidRequest: the template refuses the messages, or makes too much of them.
        """
        pieces: list[str] = []
        num_chars = 0
        variables = {**self._special_tokens, "range": _Loops().range, "messages": messages}
        try:
            for piece in self._template.generate(variables, add_generation_prompt=True):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise _Refused(f"the prompt exceeds {MAX_RENDERED_CHARS} characters")
        except _Refused as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {_short(error)}", field=field
            ) from None
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise InvalidRequest(
                f"the model's chat template fails on the messages: {_short(error)}", field=field
            ) from error
        return "".join(pieces)


def _short(error: Exception) -> str:
    """A template's words may quote a message."""
    return str(error)[:MAX_REASON_CHARS]


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(template: str) -> str:
    return datetime.datetime.now().strftime(template)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
