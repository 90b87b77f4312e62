"""sglang-router (PyPI, Rust) in P/D mode over HTTP stubs, as a Target of `baton bench router`.

What it does per call: picks a prefill and a decode worker, adds the bootstrap fields to the body, sends it to both, and passes
decode's bytes on as they come. It neither tokenises nor reads a token. Chosen for its lowest cost: one worker of each kind,
policy round_robin (no cache tree), no retries, no circuit breaker, no API key, log level error. Its metrics are scraped.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.peers.server import PeerServer
from bench.router_bench_load import HttpStub, Records, Seen
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

PORT, METRICS_PORT = 30_000, 29_000  # in a network namespace of its own
BOOTSTRAP_PORT = "9000"  # of the prefill worker; nobody connects to it
NUM_PROMPTS = 1_000
PROMPT_WORDS = 32  # nearly a token each
WORDS = ("time", "house", "river", "stone", "light", "paper", "green", "seven")
SETTLE_S = 1.0  # for the stub to notice that its client's client has left


class SglangRouter:
    """Runs between __init__ and close."""

    def __init__(self, python: str, model: str, step_s: float = STEP_S) -> None:
        """Raises: ChildError: it does not run."""
        self.port = PORT
        self._python, self._model = python, model
        self._stack = contextlib.ExitStack()
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            stub = self._stack.enter_context(HttpStub(step_s))
            decode, prefill = (f"http://{HOST}:{port}" for port in stub.ports)
            self._server = PeerServer("sglang-router", command(python, prefill, decode), folder)
            self._stack.callback(self._server.close)
            self._server.wait_for(PORT, self.chat())
            self._stack.callback(Scraper(METRICS_PORT, "/metrics").close)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        self._stack.close()

    def cpu_s(self) -> float:
        return family_cpu_s(self._server.pid)

    def memory_bytes(self) -> int:
        return family_memory_bytes(self._server.pid)

    def requests(self, max_tokens: int) -> list[bytes]:
        draw = random.Random(max_tokens)
        prompts = [" ".join(draw.choices(WORDS, k=PROMPT_WORDS)) for _ in range(NUM_PROMPTS)]
        return [streamed_completion(PORT, "stub", prompt, max_tokens) for prompt in prompts]

    def chat(self) -> Exchange:
        body = {"model": "stub", "messages": [{"role": "user", "content": SHORT_PROMPT}], "max_tokens": 1}
        return Exchange("/v1/chat/completions", {}, json.dumps(body).encode())

    def settle(self) -> None:
        time.sleep(SETTLE_S)

    @contextlib.contextmanager
    def logged(self) -> Iterator[Said]:
        """The stub writes the instant into each token's text, from where the generator reads it."""
        yield said_in_text

    @contextlib.contextmanager
    def unpaced(self) -> Iterator[SglangRouter]:
        """Another one: the stub's pace is an argument."""
        self.close()
        fast = SglangRouter(self._python, self._model, step_s=0.0)
        try:
            yield fast
        finally:
            fast.close()


def said_in_text(seen: Seen) -> Records:
    return seen.events


def command(python: str, prefill: str, decode: str) -> list[str]:
    return [
        python, "-m", "sglang_router.launch_router", "--host", HOST, "--port", str(PORT), "--pd-disaggregation",
        "--prefill", prefill, BOOTSTRAP_PORT, "--decode", decode, "--policy", "round_robin",
        "--prometheus-host", HOST, "--prometheus-port", str(METRICS_PORT), "--worker-startup-check-interval", "1",
        "--disable-retries", "--disable-circuit-breaker", "--log-level", "error", "--max-concurrent-requests", "8192",
    ]  # fmt: skip
