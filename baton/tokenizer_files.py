"""Build a tokenizer from GGUF metadata: byte-level BPE with the model's own merges and special tokens. Loads no torch.

The pre-tokenizer is only named in the file; those known here are spelled out, any other is refused, since a wrong split gives
other tokens without any error. Source of the names: llama.cpp, llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from baton.errors import ConfigError
from baton.gguf_header import Value

TOKENIZER_BUILD = 1  # part of a kept file's name; raise it when the same metadata gives another tokenizer
_CONTROL, _USER_DEFINED = 3, 4  # llama.h, llama_token_type
# Whether every digit is a token of its own; otherwise both split like GPT-2.
_SINGLE_DIGITS = {"smollm": True, "gpt-2": False}


def tokenizer_from_gguf(metadata: Mapping[str, Value], path: Path) -> Tokenizer:
    """Build the tokenizer. Control tokens are one id each wherever their text stands in a prompt.

    Raises: ConfigError naming `path` and the field.
    """
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or not isinstance(split, str) or split not in _SINGLE_DIGITS:
        raise _refuse(
            path, f"tokenizer {kind!r} with pre-tokenizer {split!r} is not supported: use the Hugging Face files"
        )
    tokens, merges = _strings(metadata, "tokens", path), _strings(metadata, "merges", path)
    vocab = {token: i for i, token in enumerate(tokens)}
    types = metadata.get("tokenizer.ggml.token_type", [])
    if len(vocab) != len(tokens) or not isinstance(types, list) or len(types) != len(tokens):
        raise _refuse(path, "its tokens and token types do not fit together: fetch it again")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise _refuse(path, "a merge does not fit its tokens: fetch it again")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if _SINGLE_DIGITS[split]:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    for special, number in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [token for token, kind in zip(tokens, types, strict=True) if kind == number]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") is True and isinstance(bos, int) and 0 <= bos < len(tokens):
        start = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(single=[start, "$A"], special_tokens=[(start, bos)])
    return tokenizer


def _strings(metadata: Mapping[str, Value], key: str, path: Path) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not values:
        raise _refuse(path, f"tokenizer.ggml.{key} is missing: fetch it again")
    return [str(value) for value in values]


def _refuse(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why}", field="model.path")
