"""A conversation through a router over real workers, UCX between them: turn 2 prefills its new message and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import pytest

from baton.config import EngineConfig, KVTransferConfig, ModelConfig, RouterConfig, WorkerConfig
from baton.model_files import load_model_files
from baton.v1 import serving_pb2, serving_pb2_grpc, worker_pb2
from router.fleet import Endpoint
from router.front_end import FrontEnd
from router.rates import DEFAULT_PREFILL_TOKENS_PER_S
from router.session import WorkerView
from tests.router.router_rig import until
from tests.tiny_models import VOCAB_SIZE, make_tiny_model
from worker.server import WorkerServer

S = 16  # tokens per block
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * S  # layers x (K, V) x kv heads x head dim x fp32, tests/tiny_models.py
PROMPT = [(37 * i * i + 11 * i) % (VOCAB_SIZE - 10) + 5 for i in range(500)]
MESSAGE = [(29 * i * i + 7 * i) % (VOCAB_SIZE - 10) + 5 for i in range(40)]
NUM_ANSWER = 200


class Cluster:
    def __init__(self, front_end: FrontEnd, channel: grpc.aio.Channel) -> None:
        self.front_end = front_end
        self._stub = serving_pb2_grpc.ServingStub(channel)

    def endpoint(self, worker_id: str) -> Endpoint:
        return next(e for e in self.front_end.fleet.endpoints if e.worker_id == worker_id)

    def view(self, worker_id: str) -> WorkerView:
        view = self.endpoint(worker_id).session.view
        assert view is not None
        return view

    def load(self, worker_id: str) -> worker_pb2.Load:
        return self.view(worker_id).load

    async def slow_down(self, worker_id: str, tokens_per_s: float) -> None:
        """Let the router believe that this worker computes so fast."""
        fleet, endpoint = self.front_end.fleet, self.endpoint(worker_id)
        fleet.peers_like(self.view(worker_id).opened.fingerprint, endpoint.shape).speed.tokens_per_s = tokens_per_s
        endpoint.rates.prefill_tokens_per_s = tokens_per_s
        await until(lambda: fleet.table.prefill_tokens_per_s[endpoint.row] == tokens_per_s, "the next heartbeat")

    def num_cached(self, worker_id: str) -> int:
        return len(self.view(worker_id).prefixes)

    async def generate(self, token_ids: Sequence[int], num_tokens: int) -> tuple[list[int], serving_pb2.Done]:
        request = serving_pb2.GenerateRequest(
            token_ids=serving_pb2.TokenIds(ids=token_ids),
            sampling=serving_pb2.Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        )
        said: list[int] = []
        async for response in self._stub.Generate(request):
            said += response.chunk.token_ids
            if response.HasField("done"):
                return said, response.done
        raise AssertionError("the stream ended without an end")

    async def idle(self) -> None:
        """Every worker has said that it holds nothing."""
        await until(lambda: all(is_idle(self.load(e.worker_id)) for e in self.front_end.fleet.endpoints), "idle")


def is_idle(load: worker_pb2.Load) -> bool:
    gauges = (load.num_running, load.num_waiting, load.active_blocks, load.reserved_blocks)
    return not any((*gauges, load.num_tickets, load.num_leases, load.slots_in_use))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("flow-back") / "tiny")


@contextlib.asynccontextmanager
async def cluster(model_dir: Path, *roles: str, **settings: object) -> AsyncIterator[Cluster]:
    """Workers named by their roles and a number; a router over them."""
    engine = EngineConfig(num_blocks=256, num_threads=1)
    workers = [
        WorkerServer(
            WorkerConfig(
                f"{role}-{n}", role=role, model=ModelConfig(path=str(model_dir)), engine=engine, kv=KVTransferConfig()
            )
        )
        for n, role in enumerate(roles)
    ]
    config = RouterConfig(http_port=0, grpc_port=0, heartbeat_s=0.1, **settings)  # type: ignore[arg-type]
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            worker.start()
            stack.callback(worker.stop)
        front_end = FrontEnd(config, load_model_files(str(model_dir)), [worker.address for worker in workers])
        await front_end.start()
        stack.push_async_callback(front_end.stop)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{front_end.grpc_port}"))
        made = Cluster(front_end, channel)
        await until(lambda: all(e.session.view is not None for e in front_end.fleet.endpoints), "every worker is known")
        await until(lambda: not front_end.fleet.unready_reason(), "the router is ready")
        yield made


async def test_turn_two_prefills_its_message_and_pulls_the_answer_of_turn_one(model_dir: Path) -> None:
    async with cluster(model_dir, "prefill", "decode") as pd:
        first, _ = await pd.generate(PROMPT, NUM_ANSWER)
        text = [*PROMPT, *first]
        on_prefill, on_decode = len(PROMPT) // S, (len(text) - 1) // S
        await until(lambda: pd.num_cached("decode-1") == on_decode, "the router knows the answer's blocks")
        await pd.idle()
        before = pd.load("prefill-0").prompt_tokens_computed, pd.load("decode-1").kv_bytes_sent
        assert before == (len(PROMPT), 0)
        # The model is so tiny that computing 200 tokens may be quicker than any pull: let it be as slow as a real one.
        await pd.slow_down("prefill-0", DEFAULT_PREFILL_TOKENS_PER_S)
        prompt = [*text, *MESSAGE]
        said, done = await pd.generate(prompt, 20)
        await pd.idle()
        assert pd.load("prefill-0").prompt_tokens_computed - len(PROMPT) == len(prompt) - on_decode * S
        assert pd.load("decode-1").kv_bytes_sent == (on_decode - on_prefill) * BLOCK_BYTES
        assert done.usage.cached_tokens == on_decode * S
        assert pd.load("decode-1").prompt_tokens_computed == 0
    async with cluster(model_dir, "both") as colocated:
        assert await _tokens(colocated, PROMPT, NUM_ANSWER) == first
        assert await _tokens(colocated, prompt, 20) == said, "the answer equals the reference"


async def _tokens(served: Cluster, prompt: Sequence[int], num_tokens: int) -> list[int]:
    said, _ = await served.generate(prompt, num_tokens)
    return said


async def test_a_short_message_is_prefilled_on_the_decode_worker_where_that_is_allowed(model_dir: Path) -> None:
    async with cluster(model_dir, "prefill", "decode", local_prefill_tokens=64) as pd:
        first, _ = await pd.generate(PROMPT, NUM_ANSWER)
        text = [*PROMPT, *first]
        on_decode = (len(text) - 1) // S
        await until(lambda: pd.num_cached("decode-1") == on_decode, "the router knows the answer's blocks")
        await pd.idle()
        prompt = [*text, *MESSAGE]
        _, done = await pd.generate(prompt, 20)
        await pd.idle()
        assert done.timings.prefill_worker == done.timings.decode_worker == "decode-1"
        assert pd.load("decode-1").prompt_tokens_computed == len(prompt) - on_decode * S
        assert pd.load("decode-1").kv_bytes_sent == 0


async def test_of_two_decode_workers_the_one_that_knows_the_conversation_goes_on_with_it(model_dir: Path) -> None:
    async with cluster(model_dir, "prefill", "decode", "decode") as pd:
        text = PROMPT
        homes = []
        for _ in range(3):
            said, done = await pd.generate(text, 40)
            text = [*text, *said, *MESSAGE]
            homes.append(done.timings.decode_worker)
            await pd.idle()
            await until(lambda: pd.num_cached(homes[-1]) >= (len(text) - len(MESSAGE) - 1) // S, "blocks are known")  # noqa: B023
        assert len(set(homes)) == 1, homes
