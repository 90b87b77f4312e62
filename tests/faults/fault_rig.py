"""Real worker processes and a test that plays their router.

A FaultWorker is one `fault_worker.py` process; a FaultRouter has a Session to each, tells prefill workers their peers, and
follows every call as router/handoff.py does: what prefill says counts until it has handed over, then what decode says; a
worker that dies ends the calls that were with it. It is one router, of one epoch, for a whole test: nobody restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.config import EngineConfig, KVTransferConfig, WorkerConfig
from baton.config_load import to_json
from baton.request import SamplingParams
from baton.v1 import worker_pb2
from engine.scripted_runner import answer
from tests.worker.session_client import SessionClient, request

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0  # other work shares these cores
TTL_S = 100.0  # of a call: longer than any test waits, so that it is never the deadline that frees
FRAME_BYTES = 20 << 10  # two blocks of the scripted layout
NUM_SLOTS = 2
NUM_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Times:
    """How long workers wait, and for how long a test stops one."""

    lease_s: float
    stop_s: float


QUICK = Times(lease_s=2.0, stop_s=4.0)  # the ratio of the full ones
FULL = Times(lease_s=5.0, stop_s=10.0)


class FaultWorker:
    """One process. `kill` and `stop` are SIGKILL and SIGSTOP."""

    def __init__(self, config: WorkerConfig, **environment: str) -> None:
        self.config = config
        self.was_killed = False
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(to_json(config))
            file.flush()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.fault_worker", "--config", file.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if not os.environ.get("FAULT_LOGS") else None,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            )
            said = self._line(lambda line: isinstance(line, dict))
        self.peer = worker_pb2.Peer(
            worker_id=config.worker_id, epoch=said["epoch"], address=f"{config.host}:{said['port']}"
        )
        self.port = int(said["port"])
        self.address = self.peer.address  # for Sessions; `peer` is what other workers are told

    @property
    def worker_id(self) -> str:
        return self.config.worker_id

    @property
    def is_prefill(self) -> bool:
        return self.config.role in ("prefill", "both")

    def again(self, *, same_address: bool) -> FaultWorker:
        """Another process in its place."""
        config = dataclasses.replace(self.config, port=self.port if same_address else 0)
        return FaultWorker(config)

    def ask(self, command: str, *arguments: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        return self._line(lambda line: isinstance(line, list))[1]

    def _line(self, is_it: Callable[[Any], bool]) -> Any:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            if raw[:1] in b"[{":  # UCX writes its own warnings to standard output
                with contextlib.suppress(json.JSONDecodeError):
                    line = json.loads(raw)
                    if is_it(line):
                        return line
        self._close()
        raise AssertionError(f"{self.config.worker_id} ended with {self.process.returncode}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.was_killed = True
        self.process.kill()
        self._close()

    def end(self) -> int:
        """Ask it to end; its exit status."""
        if not self.was_killed:
            self.go_on()
            self.process.terminate()
            self._close()
        return self.process.returncode

    def _close(self) -> None:
        self.process.wait(PATIENCE_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@dataclass(slots=True)
class Call:
    seq: int
    prompt: list[int]
    max_tokens: int
    prefill: SessionClient
    decode: SessionClient

    @property
    def expected(self) -> list[int]:
        return answer(self.prompt, SamplingParams(max_tokens=1, temperature=0.0), self.max_tokens)

    @property
    def tokens(self) -> dict[int, int]:
        return self.prefill.tokens.get(self.seq, {}) | self.decode.tokens.get(self.seq, {})

    @property
    def outcome(self) -> str:
        """ "" = not over. Of the worker that answers for it."""
        said = self._said(self.prefill)
        if said not in ("", "HANDED_OFF", "WORKER_LOST"):
            return said
        at_decode = self._said(self.decode)
        if said == "WORKER_LOST" and not self.decode.tokens.get(self.seq):
            return said  # nobody knows whether decode ever heard of it
        return at_decode if said else ""

    @property
    def error(self) -> str:
        for part in (self.prefill, self.decode):
            if self.seq in part.refused:
                return part.refused[self.seq].message
            if self.seq in part.ended and part.ended[self.seq].HasField("error"):
                return part.ended[self.seq].error.message
        return ""

    def _said(self, part: SessionClient) -> str:
        if self.seq in part.refused:
            return "REFUSED"
        if self.seq in part.ended:
            return worker_pb2.Outcome.Name(part.ended[self.seq].outcome).removeprefix("OUTCOME_")
        return "WORKER_LOST" if part.failure is not None else ""

    def check(self) -> None:
        """No wrong token, and all of them where it says that it is finished."""
        expected = dict(enumerate(self.expected))
        wrong = {index: token for index, token in self.tokens.items() if expected.get(index) != token}
        assert not wrong, f"seq {self.seq:#x}: wrong tokens {wrong}"
        if self.outcome == "FINISHED":
            assert self.tokens == expected, f"seq {self.seq:#x} is finished with {len(self.tokens)} tokens"


class FaultRouter:
    """The test's own router: never restarted, one epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.calls: list[Call] = []
        self.sessions: dict[str, SessionClient] = {}
        self.workers: dict[str, FaultWorker] = {}
        self._stack = contextlib.AsyncExitStack()

    async def meet(self, *workers: FaultWorker) -> None:
        """Open Sessions to workers that are new, or new again, and tell every prefill worker of the decode workers."""
        for worker in workers:
            client = await self._stack.enter_async_context(SessionClient(worker.address, self.epoch))
            self.sessions[worker.worker_id], self.workers[worker.worker_id] = client, worker
        decode = [worker.peer for worker in self.workers.values() if worker.config.role in ("decode", "both")]
        for worker in self.workers.values():
            if worker.is_prefill:
                peers = [peer for peer in decode if peer.worker_id != worker.worker_id]
                self.sessions[worker.worker_id].send(peers=worker_pb2.Peers(decode=peers))

    async def close(self) -> None:
        await self._stack.aclose()

    def submit(
        self, prompt: Sequence[int], max_tokens: int, prefill: str = "p", decode: str = "d", ttl_s: float = TTL_S
    ) -> Call:
        seq = self.epoch << 32 | len(self.calls) + 1
        call = Call(seq, list(prompt), max_tokens, self.sessions[prefill], self.sessions[decode])
        self.calls.append(call)
        peer = self.workers[decode].peer
        call.prefill.submit(request(seq, prompt, max_tokens, ignore_eos=True), peer, int(1e3 * ttl_s))
        return call

    def cancel(self, call: Call) -> None:
        for part in (call.prefill, call.decode):
            part.send(cancel=worker_pb2.Cancel(seq=call.seq))

    async def end_of(self, *calls: Call) -> None:
        """Until each is over, following them as a router does."""
        await until(lambda: all(call.outcome for call in calls), lambda: [(hex(c.seq), c.outcome) for c in calls])
        for call in calls:
            if call.outcome != "FINISHED":
                self.cancel(call)  # whoever may still hold it is told (router/handoff.py)
            call.check()

    async def plain(self, prefill: str = "p", decode: str = "d") -> Call:
        """A call that must work now; like a router it tries again while the pair is being set up."""
        started_s = time.monotonic()
        while True:
            call = self.submit(prompt(100, salt=len(self.calls)), 8, prefill, decode)
            await self.end_of(call)
            if call.outcome == "FINISHED":
                return call
            assert time.monotonic() - started_s < PATIENCE_S, call.error
            await asyncio.sleep(0.1)

    async def idle(self, *names: str) -> float:
        """Until nothing is left on these workers (all of them by default); returns the seconds it took."""
        started_s = time.monotonic()
        for name in names or tuple(self.workers):
            await self._idle(name, self.sessions[name])
        return time.monotonic() - started_s

    async def _idle(self, name: str, client: SessionClient) -> None:
        for _ in range(2):  # the first report may have been on its way
            seen = client.load
            await until(lambda: client.load is not seen, lambda: f"{name} is silent")  # noqa: B023  awaited at once
        await until(lambda: not leftovers(client.load), lambda: f"{name} keeps {leftovers(client.load)}")


IDLE_GAUGES = (
    "num_running", "num_waiting", "active_blocks", "reserved_blocks", "num_tickets", "num_leases", "slots_in_use",
    "quarantined_slots",
)  # fmt: skip


def leftovers(load: worker_pb2.Load) -> dict[str, int]:
    return {name: getattr(load, name) for name in IDLE_GAUGES if getattr(load, name)}


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(31 * i * i + 17 * i + 7 * salt) % 900 + 20 for i in range(length)]


async def until(condition: Callable[[], bool], what: Callable[[], object] = str) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, f"still waiting: {what()}"
        await asyncio.sleep(0.02)


def config_of(worker_id: str, role: str, times: Times, num_blocks: int = NUM_BLOCKS, **kv: object) -> WorkerConfig:
    """A worker whose leases, not its other limits, free what a fault left: those are far longer."""
    transfer = KVTransferConfig(
        frame_bytes=FRAME_BYTES,
        num_slots=NUM_SLOTS,
        lease_s=times.lease_s,
        transfer_timeout_s=max(10.0, 2 * times.stop_s),
    )
    return WorkerConfig(
        worker_id,
        role=role,
        prefill_role="tests.faults.fault_gates:build_prefill",
        decode_role="tests.faults.fault_gates:build_decode",
        heartbeat_s=times.lease_s / 10,  # the ratio of the defaults
        missed_heartbeats=100,  # of the test, whose loop waits for processes now and then
        engine=EngineConfig(chunk_tokens=64, num_blocks=num_blocks, prefix_cache=False),
        kv=dataclasses.replace(transfer, **kv),  # type: ignore[arg-type]
        log_level="warning",
    )


class Fleet:
    """The workers of one test; whoever the test did not kill must be alive at its end, and end in order."""

    def __init__(self) -> None:
        self.workers: list[FaultWorker] = []

    async def start(self, *configs: WorkerConfig, **environment: str) -> list[FaultWorker]:
        starts = (asyncio.to_thread(FaultWorker, config, **environment) for config in configs)
        started = await asyncio.gather(*starts)
        self.workers += started
        return started

    async def restart(self, worker: FaultWorker, *, same_address: bool) -> FaultWorker:
        self.workers.append(await asyncio.to_thread(worker.again, same_address=same_address))
        return self.workers[-1]

    def end(self) -> list[str]:
        """End all; what is wrong with how they ended."""
        wrong: list[str] = []
        for worker in self.workers:
            if worker.was_killed:
                continue
            if worker.process.poll() is not None:
                wrong.append(f"{worker.worker_id} died with {worker.process.returncode}")
                worker.was_killed = True
                continue
            found = worker.ask("found")
            wrong += [f"{worker.worker_id}: {fault}" for fault in found]
        wrong += [
            f"{w.worker_id} ended with {status}" for w in self.workers if (status := w.end()) and not w.was_killed
        ]
        return wrong


@contextlib.contextmanager
def fleet() -> Iterator[Fleet]:
    """Workers for one test, and proof that nothing of them is left."""
    files = shared_files()
    workers = Fleet()
    try:
        yield workers
    finally:
        wrong = workers.end()
    assert not wrong
    give_up_s = time.monotonic() + PATIENCE_S
    while left := (shared_files() - files) | segments_of(workers):  # UCX unlinks its files right after it made them
        assert time.monotonic() < give_up_s, f"shared memory is left: {left}"
        time.sleep(0.1)


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("ucx")}


def segments_of(workers: Fleet) -> set[str]:
    """System V segments that these made and that nobody has removed."""
    pids = {str(worker.process.pid) for worker in workers.workers}
    lines = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    return {segment for _, segment, _, _, creator, *_ in lines if creator in pids}


@contextlib.asynccontextmanager
async def routing(epoch: int, *workers: FaultWorker) -> AsyncIterator[FaultRouter]:
    router = FaultRouter(epoch)
    try:
        await router.meet(*workers)
        yield router
    finally:
        await router.close()
