"""Prompts, answers and API keys are in no log line and in no error message, whatever goes wrong with a call."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from baton.errors import ConfigError, Internal
from baton.log import JsonLines
from baton.model_files import ModelFiles
from baton.v1 import serving_pb2
from router.key_file import KeyFile
from router.tenants import parse_keys
from tests.router.router_rig import Rig, request, running_rig

PROMPT = "xyzzy-never-to-be-seen"
KEY = "bk-" + "k7" * 20
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
SHA256 = hashlib.sha256(KEY.encode()).hexdigest()


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Everything that any logger says, at every level, as this process would write it."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonLines("test"))
    root, ours = logging.getLogger(), logging.getLogger("baton")
    levels = root.level, ours.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    ours.setLevel(logging.DEBUG)
    yield text
    root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture
async def keyed(files: ModelFiles, tmp_path: Path) -> AsyncIterator[Rig]:
    (tmp_path / "keys").write_text(f"keys:\n- name: a\n  sha256: {SHA256}\n")
    async with running_rig(files, api_keys_file=str(tmp_path / "keys"), max_retries=0) as rig:
        yield rig


BODIES: dict[str, object] = {
    "a good call": {"prompt": PROMPT, "max_tokens": 4},
    "a chat": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4},
    "a wrong type": {"prompt": {"text": PROMPT}},
    "an unknown field": {"prompt": PROMPT, PROMPT: 1},
    "a wrong number": {"prompt": PROMPT, "max_tokens": PROMPT},
    "a message of no role": {"messages": [{"role": PROMPT, "content": PROMPT}]},
    "no object": [PROMPT],
    "no JSON": f'{{"prompt": "{PROMPT}',
    "half a character": f'{{"prompt": "{PROMPT}\\ud800"}}',
}


SAY_A_NAME = ("an unknown field", "a message of no role")  # to the caller who invented it


@pytest.mark.parametrize("body", BODIES)
async def test_http_calls_good_and_bad_are_logged_without_their_text(
    keyed: Rig, written: io.StringIO, body: str
) -> None:
    made = BODIES[body]
    text = made if isinstance(made, str) else json.dumps(made)
    path = "/v1/chat/completions" if "messages" in text else "/v1/completions"
    for headers in (AUTHORIZED, {"authorization": f"Bearer {KEY[:-1]}"}, {"x-api-key": PROMPT}):
        response = await keyed.http.post(path, content=text, headers={"content-type": "application/json", **headers})
        if response.status_code != 200 and body not in SAY_A_NAME:
            assert PROMPT not in response.text
        assert KEY[:-1] not in response.text
    _is_clean(written)


async def test_a_defect_that_quotes_the_prompt_is_logged_and_answered_without_it(
    keyed: Rig, written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def quote(*_: object) -> None:
        raise ValueError(PROMPT)

    monkeypatch.setattr(keyed.front_end.calls._sequences, "serve", quote)
    response = await keyed.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}, headers=AUTHORIZED)
    assert response.status_code == 500
    assert PROMPT not in response.text
    answer = await keyed.generate(request(PROMPT, max_tokens=4), metadata=tuple(AUTHORIZED.items()))
    assert answer.error is not None
    assert PROMPT not in answer.error.message
    assert "sequence_failed" in written.getvalue(), "the test must reach the log"
    assert "test_router_secrets" in written.getvalue()
    _is_clean(written)


async def test_a_worker_that_fails_and_a_client_that_leaves_leave_no_text_behind(
    keyed: Rig, written: io.StringIO
) -> None:
    keyed.decode.script.fail_after = (2, Internal("the model failed with ValueError"))
    answer = await keyed.generate(request(PROMPT, max_tokens=8), metadata=tuple(AUTHORIZED.items()))
    assert answer.error is not None
    keyed.decode.script.fail_after = None
    call = keyed.stub.Generate(request(PROMPT, max_tokens=30), metadata=tuple(AUTHORIZED.items()))
    assert isinstance(await call.read(), serving_pb2.GenerateResponse)
    call.cancel()
    keyed.decode.script.decode_gate.clear()
    body = {"prompt": PROMPT, "max_tokens": 8}
    with pytest.raises(httpx.ReadTimeout):
        await keyed.http.post("/v1/completions", json=body, headers=AUTHORIZED, timeout=0.2)
    keyed.decode.script.decode_gate.set()
    await keyed.idle()
    assert "call_" in written.getvalue()
    _is_clean(written, *(text for text in (answer.text,) if len(text) > 3))


def _is_clean(written: io.StringIO, *answers: str) -> None:
    for secret in (PROMPT, KEY[:-1], SHA256, *answers):
        assert secret not in written.getvalue()


# -- the key file ------------------------------------------------------------------------------------------------------

MISTAKES = {
    "a date that is none": "keys: 2024-99-99",
    "the key as a number": f"keys: !!int {KEY}",
    "no YAML": f"keys: [{KEY}: }}",
    "no list": f"keys: {KEY}",
    "a key as a setting": f"keys:\n- name: a\n  sha256: {SHA256}\n  {KEY}: 1",
    "a key as a value": f"keys:\n- name: a\n  sha256: {SHA256}\n  weight: {KEY}",
    "a key as a hash": f"keys:\n- name: a\n  sha256: {KEY}",
    "a key as a name": f"keys:\n- name: {KEY}\n  sha256: {SHA256}",
    "a key as an entry": f"keys:\n- {KEY}",
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_wrong_key_file_is_refused_without_quoting_it_and_ends_no_watch(
    tmp_path: Path, written: io.StringIO, mistake: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_keys([MISTAKES[mistake]])
    assert KEY not in refused.value.message
    file = tmp_path / "keys"
    file.write_text(f"keys:\n- name: a\n  sha256: {SHA256}\n")
    keys = KeyFile(str(file))
    file.write_text(MISTAKES[mistake])
    assert not await keys.check()
    assert keys.ring.tenant(AUTHORIZED).name == "a", "the last good keys stay in force"
    assert "api_keys_refused" in written.getvalue()
    _is_clean(written)
