"""What a model is, without its weights: read from config.json or GGUF metadata, needed by router and workers alike."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from baton.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Architecture of a decoder-only transformer and the hashes that tell two models apart."""

    name: str  # what clients call it
    architecture: str  # "llama" | "qwen3"
    num_layers: int  # L
    hidden_size: int
    ffn_size: int
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    vocab_size: int  # V
    rope_theta: float
    norm_eps: float
    max_model_len: int  # positions the model was trained for
    tie_embeddings: bool
    attention_bias: bool = False
    rope_scaling: str = ""  # canonical JSON of config.json's rope_scaling, "" = none
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # Of the weights: as stored, e.g. "Q4_1", and at loading: "int8", "Q4_1+int8". Arithmetic is in the compute dtype
    quantization: str = "none"
    weights_hash: str = ""  # sha256 of the weight files
    tokenizer_hash: str = ""  # sha256 of tokenizer.json, or of the head of a GGUF file
    numerics: str = ""  # of a deterministic worker: a digest of what it computes; "" = numbers vary with the batch

    def quantized(self, at_loading: str) -> ModelSpec:
        """What this model is once its weights are loaded; `at_loading`: ModelConfig.quantization."""
        if at_loading == "auto":
            return self
        return replace(
            self, quantization=at_loading if self.quantization == "none" else f"{self.quantization}+{at_loading}"
        )

    @property
    def is_int8(self) -> bool:
        """Whether the weights are rounded to int8 at loading, whatever the files have."""
        return self.quantization.rpartition("+")[2] == "int8"

    @property
    def rope(self) -> str:
        return f"theta={self.rope_theta:g};scaling={self.rope_scaling or 'none'}"

    @property
    def fingerprint(self) -> str:
        """32 hex digits; equal only where KV of one is right in the other. The display name is no part of it."""
        fields = asdict(self)
        del fields["name"]
        return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()

    def kv_layout(self, dtype: str, block_size: int) -> KVLayout:
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, dtype, block_size)
