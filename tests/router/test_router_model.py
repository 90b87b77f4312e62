"""What a router has to know of the model itself, and what it takes from workers."""

from __future__ import annotations

from baton.model_files import ModelFiles
from baton.v1 import serving_pb2
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import StubWorker


async def told(rig: Rig) -> tuple[str, str]:
    info = await rig.stub.GetModelInfo(serving_pb2.GetModelInfoRequest())
    assert (info.model, info.vocab_size) == ("tiny", 512)
    return info.fingerprint, info.weights_hash


async def test_which_weights_serve_is_unknown_until_a_worker_says_so(files: ModelFiles) -> None:
    async with running_rig(files, [], wait_ready=False) as rig:
        assert await told(rig) == ("", "")
        worker = await StubWorker("w0", fingerprint="a" * 32).start()
        rig.workers.append(worker)
        rig.front_end.fleet.use_addresses([worker.address])
        await until(lambda: not rig.front_end.fleet.unready_reason(), "it is there")
        assert await told(rig) == ("a" * 32, "A" * 32)
        await worker.kill()
        await until(lambda: bool(rig.front_end.fleet.unready_reason()), "it is gone")
        assert await told(rig) == ("a" * 32, "A" * 32)


async def test_of_two_models_that_is_told_which_most_workers_have(files: ModelFiles) -> None:
    workers = [await StubWorker(f"w{n}", fingerprint=32 * "abb"[n]).start() for n in range(3)]
    async with running_rig(files, workers) as rig:
        await until(lambda: all(endpoint.opened for endpoint in rig.front_end.fleet.endpoints), "all are there")
        assert await told(rig) == ("b" * 32, "B" * 32)


async def test_a_worker_of_another_tokenizer_gets_no_call_and_the_reason_is_told(files: ModelFiles) -> None:
    stranger = await StubWorker("stranger", tokenizer_hash="0" * 64).start()
    async with running_rig(files, [stranger], wait_ready=False, unavailable_wait_s=0.0) as rig:
        await until(lambda: "tokenizer" in rig.front_end.fleet.unready_reason(), "the reason is told")
        ready = await rig.http.get("/readyz")
        assert ready.status_code == 503
        assert f"its tokenizer is another one ({'0' * 16}) than this router's" in ready.text
        answer = await rig.generate(request(max_tokens=3))
        assert answer.error is not None
        assert "its tokenizer is another one" in answer.error.message
        known = await StubWorker("known", tokenizer_hash=files.spec.tokenizer_hash).start()
        rig.workers.append(known)
        rig.front_end.fleet.use_addresses([stranger.address, known.address])
        await until(lambda: not rig.front_end.fleet.unready_reason(), "another worker serves")
        assert len((await rig.generate(request(max_tokens=3))).token_ids) == 3
        assert (len(stranger.submits), len(known.submits)) == (0, 1)


async def test_a_worker_that_does_not_name_its_tokenizer_is_used(files: ModelFiles) -> None:
    worker = await StubWorker("older").start()
    async with running_rig(files, [worker]) as rig:
        assert len((await rig.generate(request(max_tokens=3))).token_ids) == 3
