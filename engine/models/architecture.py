"""Which class computes which architecture. To add one: a file beside this, a line here, a name in baton/model_config.py."""

from __future__ import annotations

from collections.abc import Mapping

from engine.models.llama import Llama
from engine.models.qwen3 import Qwen3

ARCHITECTURES: Mapping[str, type[Llama]] = {"llama": Llama, "qwen3": Qwen3}
