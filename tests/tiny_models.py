"""Random models small enough for every test: a Hugging Face directory on disk, made from a seed in milliseconds.

The weights are noise, scaled so that greedy answers wander instead of repeating one token and the two best logits are
rarely within 1e-3 of each other (untied embeddings, logits with a standard deviation near 3). The tokenizer is a real
byte-level BPE with ChatML special tokens, so any text round-trips. Loads no torch.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TEXT = """
A router takes each prompt to a worker that reads it once, and another worker writes the answer token by token.
When the first of them has finished a block of keys and values, it sends that block over the network, and the second
checks every byte before it believes any. Nothing is lost, nothing is repeated, nothing is changed: this is the promise.
The quick brown fox jumps over the lazy dog while five wizards quickly box up quartz jugs and the judge vexes a pyx.
In the morning the harbour was quiet. Boats lay side by side, their ropes slack, and the water showed the sky without
a wrinkle. A woman walked along the wall with a basket of bread under her arm and counted the gulls, as she had done on
every morning since the winter, and as always she stopped at twelve. Question: how many blocks does a table hold?
Answer: as many as there are tokens, divided by sixteen and rounded up. def schedule(self, now): return Plan(chunks)
class Engine: step = schedule, run, commit. Numbers are 0 1 2 3 4 5 6 7 8 9 10 16 32 64 128 256 512 1024 2048 4096.
"""


def make_tiny_model(
    path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 64,
    ffn_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_model_len: int = 2048,
    tie_embeddings: bool = False,
    attention_bias: bool = False,
    rope_scaling: dict[str, object] | None = None,
) -> Path:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json to `path`.

    Args: architecture is "llama" or "qwen3". The same arguments give the same bytes. Returns `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, object] = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[architecture]],
        "model_type": architecture,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": ffn_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": rope_scaling,
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "tie_word_embeddings": tie_embeddings,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
    }
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [EOS_TOKEN_ID]})
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[1],
            "eos_token": SPECIAL_TOKENS[2],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    save_file(_weights(config, np.random.default_rng(seed)), path / "model.safetensors", metadata={"format": "pt"})
    return path


def tiny_tokenizer() -> Tokenizer:
    """Build the byte-level BPE of exactly VOCAB_SIZE ids that every tiny model shares."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def _weights(config: dict[str, object], rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    """Draw every tensor under its Hugging Face name; rows of a linear have norm `gain`, so that scales are kept."""

    def size(key: str) -> int:
        value = config[key]
        assert isinstance(value, int)
        return value

    def linear(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        return np.asarray(rng.standard_normal((rows, columns)) * gain / np.sqrt(columns), dtype=np.float32)

    def norm(width: int, gain: float = 1.0) -> NDArray[np.float32]:
        return np.asarray(gain * (1.0 + 0.1 * rng.standard_normal(width)), dtype=np.float32)

    hidden, ffn, head_dim = size("hidden_size"), size("intermediate_size"), size("head_dim")
    q_size, kv_size = size("num_attention_heads") * head_dim, size("num_key_value_heads") * head_dim
    weights = {
        "model.embed_tokens.weight": linear(VOCAB_SIZE, hidden, gain=3.0 if config["tie_word_embeddings"] else 6.0),
        "model.norm.weight": norm(hidden),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = linear(VOCAB_SIZE, hidden, gain=3.0)
    for i in range(size("num_hidden_layers")):
        layer = f"model.layers.{i}."
        weights |= {
            layer + "input_layernorm.weight": norm(hidden),
            layer + "post_attention_layernorm.weight": norm(hidden),
            layer + "self_attn.q_proj.weight": linear(q_size, hidden, gain=2.5),
            layer + "self_attn.k_proj.weight": linear(kv_size, hidden, gain=2.5),
            layer + "self_attn.v_proj.weight": linear(kv_size, hidden, gain=2.0),
            layer + "self_attn.o_proj.weight": linear(hidden, q_size, gain=3.0),
            layer + "mlp.gate_proj.weight": linear(ffn, hidden, gain=2.0),
            layer + "mlp.up_proj.weight": linear(ffn, hidden),
            layer + "mlp.down_proj.weight": linear(hidden, ffn),
        }
        if config["attention_bias"]:
            weights |= {
                layer + "self_attn.q_proj.bias": rng.standard_normal(q_size).astype(np.float32) * np.float32(0.3),
                layer + "self_attn.k_proj.bias": rng.standard_normal(kv_size).astype(np.float32) * np.float32(0.3),
                layer + "self_attn.v_proj.bias": rng.standard_normal(kv_size).astype(np.float32) * np.float32(0.3),
                layer + "self_attn.o_proj.bias": rng.standard_normal(hidden).astype(np.float32) * np.float32(0.3),
            }
        if config["model_type"] == "qwen3":
            weights |= {
                layer + "self_attn.q_norm.weight": norm(head_dim, gain=1.7),
                layer + "self_attn.k_norm.weight": norm(head_dim, gain=1.7),
            }
    return weights


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def make_tiny_gguf(path: Path, hf_model: Path) -> Path:
    """Write the tiny Llama in `hf_model` as one fp32 GGUF file, q and k rows interleaved as llama.cpp's converter does."""
    config = json.loads((hf_model / "config.json").read_text())
    tokenizer = json.loads((hf_model / "tokenizer.json").read_text())
    tokens = [token for token, _ in sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])  # 3 = control, 1 = normal
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in load_file(hf_model / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    for hf_part, gguf_part in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ):
        name = name.replace(hf_part, gguf_part)
    return name
