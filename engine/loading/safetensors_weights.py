"""One safetensors file. The library maps it and checks its header against its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from baton.model_spec import ModelSpec


class SafetensorsSource:
    """Tensors by Hugging Face name."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.file: Any = safe_open(path, framework="pt")
        self.tied = spec.tie_embeddings

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self.file.get_slice(name).get_shape()) for name in self.file.keys()}  # noqa: SIM118 - no mapping

    def may_ignore(self, name: str) -> bool:
        """Say whether a tensor carries nothing of its own: a tied head, or angles that older exporters stored."""
        return name.endswith("rotary_emb.inv_freq") or (self.tied and name == "lm_head.weight")

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self.file.get_tensor(name).clone()  # else it would be a view of the file, changing with it
        return tensor
