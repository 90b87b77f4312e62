"""ai-dynamo's frontend (PyPI, Rust) over its own mock engines, as a Target of `baton bench router`.

What it does per call: tokenises, sends the ids over its TCP plane to a prefill and a decode engine, detokenises what comes back
and writes OpenAI events. Chosen for its lowest cost: one engine of each kind, router mode round-robin (no KV index, no events),
discovery by files, request plane tcp, no planner, no etcd, no NATS, no API keys, log level error, metrics scraped.
The mock engines keep time by themselves and do not say when a token left them.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from baton.model_files import load_model_files
from bench.peers.server import PeerServer
from bench.router_bench_load import Seen
from bench.router_bench_messages import VOCABULARY
from bench.router_bench_target import (
    HOST,
    SHORT_PROMPT,
    STEP_S,
    Exchange,
    Said,
    Scraper,
    family_cpu_s,
    family_memory_bytes,
    streamed_completion,
)

PORT = 8_123  # in a network namespace of its own
MODEL = "stub"
NUM_PROMPTS = 1_000
PROMPT_TOKENS = 32
SETTLE_S = 2.0  # for cancels to reach the engines
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp")


class DynamoFrontend:
    """Runs between __init__ and close."""

    def __init__(self, python: str, model: str, step_s: float = STEP_S) -> None:
        """Raises: ChildError: it does not run."""
        self.port = PORT
        self._python, self._model = python, model
        self._stack = contextlib.ExitStack()
        try:
            self._start(step_s)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, step_s: float) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(self._model, folder / "model")
        environment = {"DYN_FILE_KV": str(folder / "discovery"), "DYN_LOG": "error", "HF_HUB_OFFLINE": "1"}
        words = [self._python, "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(PORT), *PLANES]
        self._server = PeerServer("dynamo-frontend", [*words, "--router-mode", "round-robin"], folder, environment)
        self._stack.callback(self._server.close)
        for role in ("prefill", "decode"):
            engine = engine_command(self._python, folder / "model", role, step_s)
            self._stack.callback(PeerServer(f"dynamo-{role}", engine, folder, environment).close)
        self._server.wait_for(PORT, self.chat())
        self._stack.callback(Scraper(PORT, "/metrics").close)

    def close(self) -> None:
        self._stack.close()

    def cpu_s(self) -> float:
        return family_cpu_s(self._server.pid)

    def memory_bytes(self) -> int:
        return family_memory_bytes(self._server.pid)

    def requests(self, max_tokens: int) -> list[bytes]:
        draw = random.Random(max_tokens)
        prompts = [draw.choices(VOCABULARY, k=PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
        return [streamed_completion(PORT, MODEL, prompt, max_tokens) for prompt in prompts]

    def chat(self) -> Exchange:
        body = {"model": MODEL, "messages": [{"role": "user", "content": SHORT_PROMPT}], "max_tokens": 1}
        return Exchange("/v1/chat/completions", {}, json.dumps(body).encode())

    def settle(self) -> None:
        time.sleep(SETTLE_S)

    @contextlib.contextmanager
    def logged(self) -> Iterator[Said]:
        yield unknown

    @contextlib.contextmanager
    def unpaced(self) -> Iterator[DynamoFrontend]:
        """Another one: the engines' pace is an argument."""
        self.close()
        fast = DynamoFrontend(self._python, self._model, step_s=0.0)
        try:
            yield fast
        finally:
            fast.close()


def unknown(seen: Seen) -> None:
    """The engines do not say when a token left them."""


def engine_command(python: str, model: Path, role: str, step_s: float) -> list[str]:
    speed = "1.0" if step_s else "0"  # 0: as fast as it can
    return [
        python, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL, "--disaggregation-mode", role,
        "--speedup-ratio", speed, "--max-num-seqs", "2048", *PLANES,
    ]  # fmt: skip


def write_model(name: str, folder: Path) -> None:
    """What of our model the frontend wants to see: a Hugging Face folder without weights. Raises: ConfigError."""
    files = load_model_files(name)
    spec = files.spec
    folder.mkdir()
    shutil.copyfile(files.tokenizer_json, folder / "tokenizer.json")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_model_len,
        "eos_token_id": list(spec.eos_token_ids),
        "bos_token_id": spec.bos_token_id,
        "torch_dtype": "float32",
    }
    pieces = {"config.json": config, "generation_config.json": {"eos_token_id": list(spec.eos_token_ids)}}
    pieces["tokenizer_config.json"] = {"chat_template": files.chat_template}
    for file_name, value in pieces.items():
        (folder / file_name).write_text(json.dumps(value))
