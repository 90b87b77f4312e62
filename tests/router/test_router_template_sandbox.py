"""Hostile chat templates: each is stopped by what it wants done, not by a clock, with one clear error."""

from __future__ import annotations

import tracemalloc

import pytest

from baton.errors import ConfigError, InvalidRequest
from router.chat_template import INLINE_WORK, ChatTemplate
from router.template_sandbox import OverBudget
from tests.tiny_models import CHAT_TEMPLATE

USER = [{"role": "user", "content": "hi"}]
MAX_PEAK_BYTES = 256 << 20  # what the budget lets a rendering of so small a message build, four bytes a character

TUPLES = "{% set t = namespace(x=(1,)) %}{% for i in range(60) %}{% set t.x = (t.x, t.x) %}{% endfor %}"  # 2^60 to hash
LOOPS = [
    "{% for i in range(10000000000) %}x{% endfor %}",
    "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in range(99999) %}{% for c in messages[0]['content'] * 9999 %}{% endfor %}{% endfor %}",
    "{{ range(99999999999) | list }}",
    "{{ range(99999) | map('string') | map('upper') | map('lower') | map('trim') | list }}",
    "{% set l = range(9999) | list %}{{ l | map('in', l) | list }}",
    "{% set l = range(9999) | list %}{% for i in l %}{{ l | sort }}{% endfor %}",
    "{% if 1.5 in range(10000000000) %}x{% endif %}",
    "{{ range(10000000000) | sort }}",
    "{{ [1.5] | select('in', range(10000000000)) | list }}",
    "{{ 1.5 is in range(10000000000) }}",
    *(
        f"{TUPLES}{use}"
        for use in ("{% set d = {t.x: 1} %}", "{{ {}[t.x] }}", "{{ {}.get(t.x) }}", "{{ dict([[t.x, 1]]) }}")
    ),
]
STRINGS = [
    "{{ 'x' * 1000000000 }}",
    "{{ [1] * 1000000000 }}",
    "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x == [n.x] }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(900) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson(indent=16) }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x.replace('', n.x) %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "{% set x = 'ab' * 9999 %}{{ x.join(range(99999) | map('string')) }}",
    "{% set x = 'ab' * 9999 %}{{ range(99999) | join(x) }}",
    "{% set x = 'ab' * 999999 %}{% for i in range(99999) %}{{ 'c' in x }}{% endfor %}",
    "{% set x = 'ab' * 999999 %}{% for i in range(99999) %}{% if x == x ~ '' %}{% endif %}{% endfor %}",
    "{% set x = 'ab' * 999999 %}{% for i in range(99999) %}{% set y = x[::-1] %}{% endfor %}",
    "{% set x = 'ab' * 999999 %}{% for i in range(99999) %}{% set y = x.split('a') %}{% endfor %}",
    "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "{{ 9 ** 99999 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ 'x' | indent(999999999) }}",
    "{{ [1] | tojson(indent=999999999) }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ 'a'.expandtabs(999999999) }}",
    "{{ strftime_now('%Y' * 99) }}",
]
ESCAPES = [
    "{{ messages.__class__.__mro__ }}",
    "{{ messages[0].__init__.__globals__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''.__class__('x') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ range.__globals__ }}",
    "{{ self.__init__ }}{{ self._TemplateReference__context.environment }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ '{0.__class__}'.format('x') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].clear() }}",
    "{{ loop }}{{ caller() }}",
    "{{ lipsum(n=99999) }}",
    "{{ cycler('a').reset }}{{ cycler('a') }}",
    "{{ messages[7]['content'].x }}",
    "{{ 1 // 0 }}",
    "{{ range }}",
    "{{ dict('x') }}",
]
UNUSABLE = [
    "{% for %}",
    "{% include 'other' %}",
    "{% import 'os' as os %}",
    "{% from 'os' import system %}",
    "{% extends 'other' %}",
    "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ 'x' | center(999999999) }}",
    "{{ 'x' | urlize }}",
    "{{ 'x' | attr('__class__') }}",
    "{{ " + "9" * 5_000 + " }}",
    "{{ " + "(" * 5_000 + ")" * 5_000 + " }}",
    "{% for i in messages %}" * 30 + "{% endfor %}" * 30,
    "x" * (1 << 20),
]


@pytest.mark.parametrize("source", LOOPS)
def test_work_out_of_proportion_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source, {}).render(USER)


@pytest.mark.parametrize("source", STRINGS)
def test_memory_out_of_proportion_is_refused_before_it_is_taken(source: str) -> None:
    template = ChatTemplate(source, {})
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="chat template"):
            template.render(USER)
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_but_the_messages_can_be_reached(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source, {}).render(USER)


@pytest.mark.parametrize("source", UNUSABLE, ids=lambda source: source[:40])
def test_a_template_that_can_never_be_used_is_a_configuration_error(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template") as refused:
        ChatTemplate(source, {})
    assert refused.value.field == "model.path"


def test_a_refusal_says_the_templates_own_reason_and_the_field_as_the_caller_wrote_it() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        template.render(USER, "chat.messages")
    assert refused.value.field == "chat.messages"


def test_a_slow_template_gives_up_early_on_the_event_loop_and_finishes_elsewhere() -> None:
    template = ChatTemplate("{% for i in range(9999) %}x{% endfor %}", {})
    with pytest.raises(OverBudget):
        template.render(USER, work=INLINE_WORK)
    assert template.render(USER) == "x" * 9999


def test_the_budget_grows_with_the_messages() -> None:
    """A large conversation takes little of what it may: four operations on each character."""
    long = [{"role": "user", "content": "x" * (1 << 20)}] * 4
    assert len(ChatTemplate(CHAT_TEMPLATE, {}).render(long)) > 4 << 20


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages | length }}{{ messages[0]['content'] | trim | upper }}", "2HI"),
        ("{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% endfor %}", "1hi"),
        ("{% for m in messages %}{{ m['role'][0] }}{% if loop.last %}.{% endif %}{% endfor %}", "ua."),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('+') }}", "hi"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro turn(m) %}[{{ m.content }}]{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}", "[hi][no]"),
        ("{{ 'a,b'.split(',')[-1] }}{{ ' x '.strip() }}{{ 'abc'[1:] }}{{ 'x' ~ 1 }}{{ 7 % 2 }}", "bxbcx11"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi"}'),
        ("{{ 'yes' if 'h' in messages[0].content and messages[0].content is string else 'no' }}", "yes"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content=hi;"),
        ("{{ messages[:1] | length }}{{ (messages | first).role }}{{ x | default('d') }}{{ x is defined }}", "1userdFalse"),
        ("{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}{{ m.content }}{% endfor %}", "hi"),
        ("{{ bos_token }}{{ 'a\\nb' | indent(2) }}{{ 'aXa'.replace('X', '-') | replace('a', 'b') }}", "<s>a\n  bb-b"),
        ("{{ '{' ~ '{ 7 * 7 }' ~ '}' }}", "{{ 7 * 7 }}"),
    ],
)  # fmt: skip
def test_what_real_templates_do_works(source: str, expected: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages) == expected
