"""From a model's path or name to its ModelSpec and files. Used by routers and workers alike; loads no torch.

Two kinds of model: a Hugging Face directory (config.json, safetensors, tokenizer.json) and a GGUF file (everything in one;
the tokenizer.json is built once and kept beside it). Names that `baton model fetch` knows live under the store,
$BATON_HOME or ~/.cache/baton. Whatever is missing, damaged or not supported is a ConfigError of one line with a remedy.
Files are untrusted: headers are checked against the file's size, and no size in them makes an allocation here.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from baton.errors import ConfigError
from baton.gguf_header import read_gguf_header
from baton.model_config import chat_template_from_hf, spec_from_gguf, spec_from_hf
from baton.model_fetch import fetch_model
from baton.model_spec import ModelSpec
from baton.model_store import KNOWN_MODELS, file_sha256, known_model_path, store_dir, write_atomically
from baton.tokenizer_files import TOKENIZER_BUILD, tokenizer_from_gguf
from baton.weights_digest import note_digest, noted_digest, stamp

__all__ = ["ModelFiles", "describe_model", "fetch_model", "load_model_files"]

DIGEST_NOTE = "weights.digest.json"  # beside a Hugging Face model's files; a GGUF file's is named after it

_MAX_JSON_BYTES = 64 << 20  # config and tokenizer files; the largest public tokenizer.json is 34 MB (Gemma 3)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's parts are. Everything else about it is in the spec."""

    spec: ModelSpec
    weights: tuple[Path, ...]
    tokenizer_json: Path
    chat_template: str  # Jinja source, "" = the model has none
    kind: str  # "gguf" | "hf"


def load_model_files(path_or_name: str) -> ModelFiles:
    """Resolve a known name, a Hugging Face directory or a .gguf file.

    Raises: ConfigError naming the file and what to do.
    """
    path = Path(path_or_name).expanduser()
    if path_or_name in KNOWN_MODELS and not path.exists():
        return _load_known(path_or_name)
    if path.is_dir():
        return _load_hf(path)
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(path, path.stem)
    raise _no_model(path_or_name, path)


def describe_model(path_or_name: str) -> ModelFiles:
    """Like `load_model_files`, but without reading weights: for who gets them elsewhere, or computes nothing.

    Weights of a Hugging Face directory need not be there. `weights_hash` is "" where it is not known without them: it is, of a
    model that is known by name, and where a note of it lies beside the files (weights_digest.py).

    Raises: ConfigError naming the file and what to do.
    """
    path = Path(path_or_name).expanduser()
    if path_or_name in KNOWN_MODELS and not path.exists():
        return _describe_gguf(_known_file(path_or_name), path_or_name, KNOWN_MODELS[path_or_name].sha256)
    if path.is_dir():
        return _describe_hf(path, noted_digest(path / DIGEST_NOTE))
    if path.is_file() and path.suffix == ".gguf":
        return _describe_gguf(path, path.stem, noted_digest(_gguf_note(path)))
    raise _no_model(path_or_name, path)


def _load_known(name: str) -> ModelFiles:
    path = _known_file(name)
    if file_sha256(path) != KNOWN_MODELS[name].sha256:
        raise _unusable(f"{path} is damaged (its sha256 is wrong): run `baton model fetch {name}` to replace it")
    return _load_gguf(path, name)


def _known_file(name: str) -> Path:
    path = known_model_path(name)
    if not path.is_file():
        raise _unusable(f"model {name!r} is not here yet ({path}): run `baton model fetch {name}`")
    return path


def _load_gguf(path: Path, name: str) -> ModelFiles:
    before = stamp([path])
    weights_hash = file_sha256(path)
    files = _describe_gguf(path, name, weights_hash)
    note_digest(_gguf_note(path), weights_hash, before)
    return files


def _gguf_note(path: Path) -> Path:
    return path.with_name(f"{path.name}.digest.json")


def _describe_gguf(path: Path, name: str, weights_hash: str) -> ModelFiles:
    header = read_gguf_header(path)
    spec = spec_from_gguf(header, path, name)
    tokenizer_json = _side_file(path, f".{header.sha256[:16]}.v{TOKENIZER_BUILD}.tokenizer.json")
    if not tokenizer_json.is_file():
        write_atomically(tokenizer_json, tokenizer_from_gguf(header.metadata, path).to_str())
    template = header.metadata.get("tokenizer.chat_template", "")
    return ModelFiles(
        # Of what it is made of: the text of tokenizer.json is another with each version of the library that writes it
        spec=replace(spec, weights_hash=weights_hash, tokenizer_hash=header.sha256),
        weights=(path,),
        tokenizer_json=tokenizer_json,
        chat_template=template if isinstance(template, str) else "",
        kind="gguf",
    )


def _side_file(path: Path, suffix: str) -> Path:
    """Return a place for a file derived from `path`: beside it, or in the store where its directory is read-only."""
    if os.access(path.parent, os.W_OK):
        return path.with_name(path.name + suffix)
    derived = store_dir() / "derived"
    derived.mkdir(parents=True, exist_ok=True)
    return derived / (path.name + suffix)


def _load_hf(path: Path) -> ModelFiles:
    files = _describe_hf(path, "")
    weights = _hf_weights(path)
    for file in weights:
        _check_safetensors(file)
    before = stamp(weights)
    digest = hashlib.sha256("".join(file_sha256(file) for file in weights).encode()).hexdigest()
    note_digest(path / DIGEST_NOTE, digest, before)
    return replace(files, spec=replace(files.spec, weights_hash=digest), weights=weights)


def _describe_hf(path: Path, weights_hash: str) -> ModelFiles:
    config = _read_json(path / "config.json")
    generation_path = path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    spec = spec_from_hf(config, generation, path / "config.json", path.resolve().name)
    tokenizer_json = path / "tokenizer.json"
    if not tokenizer_json.is_file():
        raise _unusable(f"{tokenizer_json} is missing: save the model's fast tokenizer there")
    return ModelFiles(
        spec=replace(spec, weights_hash=weights_hash, tokenizer_hash=file_sha256(tokenizer_json)),
        weights=(),
        tokenizer_json=tokenizer_json,
        chat_template=_hf_chat_template(path),
        kind="hf",
    )


def _hf_weights(path: Path) -> tuple[Path, ...]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
            raise _unusable(f"{index} has no weight_map of plain file names: fetch it again")
        weights = tuple(path / name for name in sorted(set(names.values())))
    else:
        weights = (path / "model.safetensors",)
    for file in weights:
        if not file.is_file():
            raise _unusable(f"{file} is missing: fetch it again (weights are read from safetensors only)")
    return weights


def _check_safetensors(path: Path) -> None:
    """Let the library compare the header with the file's size; it reads no tensor."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise _unusable(f"{path} is not a whole safetensors file ({error}): fetch it again") from None


def _hf_chat_template(path: Path) -> str:
    jinja = path / "chat_template.jinja"
    if jinja.exists():
        return _read_text(jinja)
    tokenizer_config = path / "tokenizer_config.json"
    return chat_template_from_hf(_read_json(tokenizer_config)) if tokenizer_config.exists() else ""


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise _unusable(f"{path} is larger than {_MAX_JSON_BYTES} bytes: it is not a model's file")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _unusable(f"{path} is missing: a model directory needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(f"cannot read {path}: {error}") from None


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError):
        raise _unusable(f"{path} is not JSON: fetch it again") from None
    if not isinstance(value, dict):
        raise _unusable(f"{path} is not a JSON object: fetch it again")
    return value


def _no_model(path_or_name: str, path: Path) -> ConfigError:
    what = "is not a .gguf file" if path.is_file() else "does not exist"
    return _unusable(
        f"model {path_or_name!r} {what}: give a Hugging Face directory, a .gguf file or one of {', '.join(KNOWN_MODELS)}"
    )


def _unusable(message: str) -> ConfigError:
    return ConfigError(message, field="model.path")
