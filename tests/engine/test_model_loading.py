"""TorchRunner from files: what is refused, and the real demo model against transformers where it has been fetched."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.model_config import ARCHITECTURES as CONFIG_ARCHITECTURES
from baton.model_files import ModelFiles, load_model_files
from baton.model_store import known_model_path
from baton.request import SamplingParams
from engine import torch_runner
from engine.loading.weights import load_weights
from engine.models.architecture import ARCHITECTURES
from engine.models.llama import Llama
from engine.ports import Batch, BatchEntry
from engine.torch_kv_cache import TorchKVCache
from engine.torch_runner import TorchRunner, load_torch_runner
from tests.tiny_models import EOS_TOKEN_ID, make_tiny_model

torch.set_num_threads(1)  # tiny tensors: a second thread only waits

GREEDY = SamplingParams(max_tokens=32, temperature=0.0)


def generate(runner: TorchRunner, prompt: list[int], num_tokens: int, sampling: SamplingParams = GREEDY) -> list[int]:
    tokens, table, start = list(prompt), list(range(runner.kv_cache.num_blocks)), 0
    for _ in range(num_tokens):
        output = tuple(tokens[len(prompt) :])
        entry = BatchEntry(1, tokens[start:], start, table, True, sampling, tuple(prompt), output)
        (drawn,) = runner.run(Batch([entry]))
        assert drawn is not None
        start = len(tokens)
        tokens.append(drawn.token)
    return tokens[len(prompt) :]


def change_weights(path: Path, **changed: Any) -> None:
    """Rewrite model.safetensors with tensors replaced, or removed where None; `__` in a name stands for a dot."""
    weights = load_file(path / "model.safetensors")
    for name, value in changed.items():
        weights.pop(name.replace("__", "."), None)
        if value is not None:
            weights[name.replace("__", ".")] = value
    save_file(weights, path / "model.safetensors")


def test_the_package_and_its_ports_load_no_torch() -> None:
    code = "import engine, engine.ports, engine.randomness, baton.model_files, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_architecture_that_a_configuration_may_name_is_built() -> None:
    assert set(CONFIG_ARCHITECTURES) == set(ARCHITECTURES)


def test_results_come_in_the_order_of_entries_and_none_where_nothing_is_sampled(tmp_path: Path) -> None:
    runner = load_torch_runner(load_model_files(str(make_tiny_model(tmp_path))), EngineConfig(), "float32", 8)
    assert runner.run(Batch([])) == []
    chunk = BatchEntry(1, [5, 6, 7], 0, [0], False, GREEDY)
    prompt = BatchEntry(2, [9, 8], 0, [1], True, GREEDY)
    single = BatchEntry(3, [4], 0, [2], True, GREEDY)
    together = runner.run(Batch([chunk, prompt, single]))
    assert together[0] is None
    assert together[1:] == runner.run(Batch([prompt])) + runner.run(Batch([single]))
    assert runner.run(Batch([chunk])) == [None]


def test_min_tokens_holds_back_the_models_own_eos(tmp_path: Path) -> None:
    runner = load_torch_runner(load_model_files(str(make_tiny_model(tmp_path))), EngineConfig(), "float32", 8)
    eager = replace(GREEDY, logit_bias=((EOS_TOKEN_ID, 100.0),), min_tokens=3)
    output = generate(runner, [5, 6, 7], 4, eager)
    assert EOS_TOKEN_ID not in output[:3]
    assert output[3] == EOS_TOKEN_ID


def test_blocks_come_from_the_number_given_else_the_option_else_the_memory(tmp_path: Path) -> None:
    files = load_model_files(str(make_tiny_model(tmp_path)))
    block_bytes = files.spec.kv_layout("float32", 16).block_bytes
    engine = EngineConfig(kv_memory_bytes=10 * block_bytes + 1)
    assert load_torch_runner(files, engine, "float32").kv_cache.num_blocks == 10
    assert load_torch_runner(files, replace(engine, num_blocks=6), "float32").kv_cache.num_blocks == 6
    assert load_torch_runner(files, replace(engine, num_blocks=6), "float32", 4).kv_cache.num_blocks == 4


@pytest.mark.parametrize(
    ("engine", "dtype", "field"),
    [
        (EngineConfig(), "int4", "model.dtype"),
        (EngineConfig(kv_cache_dtype="float8_e5m2"), "float32", "engine.kv_cache_dtype"),
        (EngineConfig(kv_memory_bytes=100), "float32", "engine.kv_memory_bytes"),
        (EngineConfig(kv_memory_bytes=1 << 50), "float32", "engine.kv_memory_bytes"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(
    engine: EngineConfig, dtype: str, field: str, tmp_path: Path
) -> None:
    files = load_model_files(str(make_tiny_model(tmp_path)))
    with pytest.raises(ConfigError, match=field) as caught:
        load_torch_runner(files, engine, dtype)
    assert caught.value.field == field
    assert "\n" not in caught.value.message


def test_a_limit_of_the_container_counts_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = load_model_files(str(make_tiny_model(tmp_path)))
    monkeypatch.setattr(torch_runner, "available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"are free: lower engine\.kv_memory_bytes"):
        load_torch_runner(files, EngineConfig(kv_memory_bytes=1 << 20), "float32")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model__norm__weight": None}, r"model\.norm\.weight is missing"),
        ({"model__norm__weight": np.ones(63, np.float32)}, r"model\.norm\.weight is \[63\].*\[64\]"),
        ({"model__layers__1__self_attn__q_proj__bias": np.ones(64, np.float32)}, r"q_proj\.bias is not part"),
        ({"model__layers__2__input_layernorm__weight": np.ones(64, np.float32)}, r"layers\.2\..* is not part"),
    ],
    ids=["missing", "misshapen", "unknown bias", "a layer too many"],
)
def test_weights_that_do_not_fit_the_configuration_are_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path)
    change_weights(tmp_path, **changed)
    with pytest.raises(ConfigError, match=message):
        load_torch_runner(load_model_files(str(tmp_path)), EngineConfig(), "float32", 4)


def test_a_configuration_of_hostile_size_costs_no_memory(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 1 << 20, "vocab_size": 1 << 20}))
    with pytest.raises(ConfigError, match="weights need"):
        load_torch_runner(load_model_files(str(tmp_path)), EngineConfig(), "float32", 1)


def test_a_tied_model_ignores_a_stored_head(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, tie_embeddings=True)
    plain = generate(_tiny_runner(tmp_path), [5, 6, 7], 8)
    change_weights(tmp_path, lm_head__weight=np.ones((512, 64), np.float32))
    assert generate(_tiny_runner(tmp_path), [5, 6, 7], 8) == plain


def test_shards_are_read_together(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    whole = generate(_tiny_runner(tmp_path), [5, 6, 7], 8)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
    for shard in set(names.values()):
        save_file({name: weights[name] for name in weights if names[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert generate(_tiny_runner(tmp_path), [5, 6, 7], 8) == whole


def _tiny_runner(path: Path) -> TorchRunner:
    return load_torch_runner(load_model_files(str(path)), EngineConfig(), "float32", 4)


@pytest.fixture(scope="module")
def smollm2() -> ModelFiles:
    if not known_model_path("smollm2").is_file():
        pytest.skip("smollm2 is not here: run `baton model fetch smollm2`")
    return load_model_files("smollm2")


def test_the_demo_model_answers_like_transformers_with_the_same_weights(smollm2: ModelFiles) -> None:
    """32 greedy tokens; a difference counts only where the reference's two best logits are 1e-3 apart (DESIGN 7)."""
    spec = smollm2.spec
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_model_len,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tie_embeddings,
    )
    with torch.device("meta"):
        reference: Any = transformers.LlamaForCausalLM(config)
    weights = load_weights(smollm2, Llama.tensor_shapes(spec), torch.float32)
    reference.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)  # its buffers are not in the state dict
    reference.eval()
    tokenizer = Tokenizer.from_file(str(smollm2.tokenizer_json))
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(text, add_special_tokens=False).ids

    cache = TorchKVCache(spec.kv_layout("float32", 16), 8)
    output = generate(TorchRunner(Llama(spec, dict(weights)), cache), prompt, 32)

    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]  # [32, V]
    best = logits.topk(2).values
    clear = (best[:, 0] - best[:, 1] > 1e-3).tolist()
    wrong = [i for i, token in enumerate(output) if clear[i] and token != int(logits[i].argmax())]
    assert wrong == []
    assert sum(clear) >= 30
    assert "Paris" in tokenizer.decode(output)
