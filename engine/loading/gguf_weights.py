"""One GGUF file of a Llama: dequantised, renamed, and with llama.cpp's order of q and k rows undone.

llama.cpp rotates neighbouring pairs where Hugging Face rotates halves, so its converter interleaves the two halves of each
head's rows (convert_hf_to_gguf.py, LlamaModel.permute); here they are put back.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from gguf.quants import dequantize, quant_shape_to_byte_shape
from torch import Tensor

from baton.errors import ConfigError
from baton.gguf_header import read_gguf_header
from baton.model_spec import ModelSpec

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFSource:
    """Tensors by Hugging Face name."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.path = path
        self.spec = spec
        self.tensors = {_hugging_face_name(name): tensor for name, tensor in read_gguf_header(path).tensors.items()}
        self.data = np.memmap(path, mode="r")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def may_ignore(self, name: str) -> bool:
        return False

    def read(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        stored = self.data[tensor.offset : tensor.offset + tensor.nbytes]
        try:
            rows = stored.reshape(quant_shape_to_byte_shape(tensor.shape, tensor.kind)) if tensor.shape else stored
            values = dequantize(rows, tensor.kind).reshape(tensor.shape)
        except NotImplementedError:
            raise ConfigError(
                f"{self.path}: quantisation {tensor.kind.name} is not supported: use another file of this model",
                field="model.path",
            ) from None
        weight = torch.from_numpy(np.array(values, dtype=np.float32))
        if name.endswith("q_proj.weight"):
            return _halves(weight, self.spec.num_heads)
        return _halves(weight, self.spec.num_kv_heads) if name.endswith("k_proj.weight") else weight


def _halves(weight: Tensor, num_heads: int) -> Tensor:
    """Undo the interleaving: per head, even rows first, then odd ones. weight [heads * D, hidden]."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _hugging_face_name(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    return _NAMES.get(name, name)
