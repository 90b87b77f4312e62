"""The note of a model's weights hash: whom it lets do without the files, and when it holds no longer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.gguf_header import read_gguf_header
from baton.model_files import DIGEST_NOTE, describe_model, load_model_files
from tests.tiny_models import make_tiny_gguf, make_tiny_model


def test_who_has_read_the_files_leaves_a_note_that_describes_the_model_without_them(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny")
    assert describe_model(str(path)).spec.weights_hash == ""
    files = load_model_files(str(path))
    (path / "model.safetensors").unlink()
    assert describe_model(str(path)).spec == files.spec
    with pytest.raises(ConfigError, match=r"model.safetensors is missing"):
        load_model_files(str(path))


def test_a_model_is_described_without_weights_and_without_a_note(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny")
    whole = load_model_files(str(path))
    for file in ("model.safetensors", DIGEST_NOTE):
        (path / file).unlink()
    described = describe_model(str(path))
    assert described.spec == replace(whole.spec, weights_hash="")
    assert (described.tokenizer_json, described.chat_template) == (whole.tokenizer_json, whole.chat_template)


def test_describing_a_gguf_file_reads_its_head_alone(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", make_tiny_model(tmp_path / "tiny"))
    described = describe_model(str(path))
    size = path.stat().st_size
    with path.open("r+b") as file:  # the weights go, their place stays
        file.truncate(min(tensor.offset for tensor in read_gguf_header(path).tensors.values()))
        file.truncate(size)
    assert describe_model(str(path)) == described
    (tmp_path / described.tokenizer_json.name).unlink()
    assert describe_model(str(path)) == described


def test_a_gguf_file_has_its_note_beside_it(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", make_tiny_model(tmp_path / "tiny"))
    files = load_model_files(str(path))
    assert describe_model(str(path)).spec == files.spec


def test_a_note_of_files_that_were_replaced_holds_no_longer(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny")
    load_model_files(str(path))
    make_tiny_model(path, seed=1)  # of the same size
    assert describe_model(str(path)).spec.weights_hash == ""
    files = load_model_files(str(path))
    assert describe_model(str(path)).spec == files.spec


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "[" * 100_000, '{"sha256": 7, "files": {}}', '{"sha256": "ab", "files": {}}',
        json.dumps({"sha256": "0" * 64, "files": {"../model.safetensors": [1, 2]}}),
        json.dumps({"sha256": "0" * 64, "files": {"model.safetensors": [1]}}),
        json.dumps({"sha256": "0" * 64, "files": ["model.safetensors"]}),
    ],
)  # fmt: skip
def test_a_note_that_is_none_is_as_good_as_no_note(tmp_path: Path, text: str) -> None:
    path = make_tiny_model(tmp_path / "tiny")
    (path / DIGEST_NOTE).write_text(text)
    assert describe_model(str(path)).spec.weights_hash == ""
