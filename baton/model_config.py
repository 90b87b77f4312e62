"""From config.json or GGUF metadata to a ModelSpec: pure functions over parsed, untrusted values.

A value that is missing, of the wrong type or out of bounds, and an option that this code would compute wrongly, is refused by
name; nothing is ignored silently that changes a result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from baton.errors import ConfigError
from baton.gguf_header import GGUFHeader
from baton.model_spec import ModelSpec

ARCHITECTURES = ("llama", "qwen3")  # engine/models/architecture.py builds these; a test holds the two together
_GGUF_ARCHITECTURES = ("llama",)
_MAX_SIZE = 1 << 24  # of any dimension; the largest public ones are 10,485,760 positions (Llama 4 Scout)
_MAX_LAYERS = 1_024  # the largest public model has 126 (Llama 3.1 405B)
_ROPE_TYPES = {"linear": ("factor",), "llama3": (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)}  # fmt: skip


class _Fields:
    """Typed reads of one untrusted mapping; errors name the file and the field."""

    def __init__(self, values: Mapping[str, object], path: Path) -> None:
        self.values = values
        self.path = path

    def refuse(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key} {why}", field="model.path")

    def get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, limit: int = _MAX_SIZE) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise self.refuse(key, f"must be a whole number from 1 to {limit}, is {_short(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not (value > 0 and math.isfinite(value)):
            raise self.refuse(key, f"must be a positive number, is {_short(value)}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.refuse(key, f"must be true or false, is {_short(value)}")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise self.refuse(key, f"must be token ids below {vocab_size}, is {_short(value)}")
        return tuple(ids)

    def only(self, key: str, *allowed: object) -> None:
        """Refuse an option that would change the result in a way we do not compute."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise self.refuse(key, f"= {_short(value)} is not supported (only {', '.join(map(repr, allowed))})")


def spec_from_hf(
    config: Mapping[str, object], generation: Mapping[str, object], path: Path, name: str
) -> ModelSpec:  # fmt: skip
    """Read config.json and generation_config.json. Raises: ConfigError."""
    fields = _Fields(config, path)
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES or not isinstance(architecture, str):
        raise fields.refuse(
            "model_type", f"= {_short(architecture)} is not supported (only {', '.join(ARCHITECTURES)})"
        )
    fields.only("hidden_act", "silu")
    fields.only("mlp_bias", False)
    fields.only("use_sliding_window", False)
    fields.only("partial_rotary_factor", 1.0)
    if config.get("quantization_config") is not None:
        raise fields.refuse(
            "quantization_config",
            "is not supported: quantised weights are read from GGUF files only; or take the model's unquantised files and"
            " model.quantization = int8",
        )
    num_heads, hidden_size = fields.size("num_attention_heads"), fields.size("hidden_size")
    vocab_size = fields.size("vocab_size")
    rope = _Fields({**config, **_mapping(fields, "rope_parameters")}, path)  # transformers 5 writes rope_parameters
    spec = ModelSpec(
        name=name,
        architecture=architecture,
        num_layers=fields.size("num_hidden_layers", limit=_MAX_LAYERS),
        hidden_size=hidden_size,
        ffn_size=fields.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=fields.size("head_dim", hidden_size // num_heads),
        vocab_size=vocab_size,
        rope_theta=rope.number("rope_theta", 10_000.0),  # transformers' own default, as the next one
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_model_len=fields.size("max_position_embeddings"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        rope_scaling=_rope_scaling(fields),
        eos_token_ids=_eos_ids(fields, _Fields(generation, path.with_name("generation_config.json")), vocab_size),
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
    )
    return _checked(spec, fields)


def spec_from_gguf(header: GGUFHeader, path: Path, name: str) -> ModelSpec:
    """Read GGUF metadata. Raises: ConfigError."""
    fields = _Fields(header.metadata, path)
    arch = header.metadata.get("general.architecture")
    if arch not in _GGUF_ARCHITECTURES or not isinstance(arch, str):
        raise fields.refuse(
            "general.architecture",
            f"= {_short(arch)} is not supported in GGUF (only {', '.join(_GGUF_ARCHITECTURES)}): use the Hugging Face files",
        )
    if "rope_freqs.weight" in header.tensors:
        raise fields.refuse(
            "rope_freqs.weight", "(llama3 rope scaling) is not read from GGUF: use the Hugging Face files"
        )
    fields.only(f"{arch}.rope.scaling.type", "none")
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise fields.refuse("token_embd.weight", "is missing: fetch the file again")
    num_heads, hidden_size = fields.size(f"{arch}.attention.head_count"), fields.size(f"{arch}.embedding_length")
    vocab_size = embeddings.shape[0]
    head_dim = fields.size(f"{arch}.attention.key_length", hidden_size // num_heads)
    fields.only(f"{arch}.rope.dimension_count", head_dim)
    eos = [fields.token_ids(f"tokenizer.ggml.{key}_token_id", vocab_size) for key in ("eos", "eot")]
    stored = [tensor for tensor in header.tensors.values() if len(tensor.shape) == 2]
    by_kind: dict[str, int] = {}
    for tensor in stored:
        by_kind[tensor.kind.name] = by_kind.get(tensor.kind.name, 0) + math.prod(tensor.shape)
    spec = ModelSpec(
        name=name,
        architecture=arch,
        num_layers=fields.size(f"{arch}.block_count", limit=_MAX_LAYERS),
        hidden_size=hidden_size,
        ffn_size=fields.size(f"{arch}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=fields.size(f"{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        rope_theta=fields.number(f"{arch}.rope.freq_base", 10_000.0),  # llama.cpp's default
        norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        max_model_len=fields.size(f"{arch}.context_length"),
        tie_embeddings="output.weight" not in header.tensors,
        eos_token_ids=tuple(dict.fromkeys(token for ids in eos for token in ids)),
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id", vocab_size)), None),
        quantization=max(by_kind, key=lambda kind: by_kind[kind]),
    )
    return _checked(spec, fields)


def chat_template_from_hf(tokenizer_config: Mapping[str, object]) -> str:
    """Return the (default) chat template of tokenizer_config.json, "" if there is none."""
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named ones: [{"name": ..., "template": ...}]
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _checked(spec: ModelSpec, fields: _Fields) -> ModelSpec:
    if spec.num_heads % spec.num_kv_heads:
        raise fields.refuse("num_key_value_heads", f"= {spec.num_kv_heads} does not divide {spec.num_heads} heads")
    if spec.head_dim % 2:
        raise fields.refuse("head_dim", f"= {spec.head_dim} is odd: rotary embeddings need pairs")
    return spec


def _mapping(fields: _Fields, key: str) -> dict[str, object]:
    value = fields.get(key, {})
    if not isinstance(value, dict):
        raise fields.refuse(key, f"must be an object, is {_short(value)}")
    return value


def _rope_scaling(fields: _Fields) -> str:
    """Return the canonical JSON of the scaling, "" for none; older files call rope_type `type`."""
    scaling = _mapping(fields, "rope_scaling") or _mapping(fields, "rope_parameters")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return ""
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        raise fields.refuse("rope_scaling", f"of type {_short(kind)} is not supported (only {', '.join(_ROPE_TYPES)})")
    numbers = _Fields(scaling, fields.path)
    return json.dumps({"rope_type": kind} | {key: numbers.number(key) for key in _ROPE_TYPES[kind]}, sort_keys=True)


def _eos_ids(config: _Fields, generation: _Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the EOS ids of both files: instruction models often add theirs to generation_config.json only."""
    ids = generation.token_ids("eos_token_id", vocab_size) + config.token_ids("eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids))


def _short(value: object) -> str:
    return repr(value)[:80]
