"""The processes of a soak, without Ray: a router and a few workers, each a real process; this event loop is their controller.

It speaks control.proto: workers announce themselves here, the router watches the fleet here and reports every worker's gauges
here once a second. Each worker stands behind a Proxy, so a restarted one keeps its address or gets another, as told. A worker
that dies without having been killed here is a finding, and so are log lines of level error and faults of scripted runners.
Event loop only; `stop` ends every process whatever happened.
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
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from baton.config import EngineConfig, KVTransferConfig, ModelConfig, RouterConfig, WorkerConfig
from baton.config_load import to_json
from baton.request import Role
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2
from cli.shared_memory import SharedMemory
from tests.soak.soak_proxy import Proxy

ROOT = Path(__file__).parents[2]
START_S = 60.0  # a worker on two busy cores: UCX and gRPC take 1-2 s, torch 3 more
STOP_S = 20.0  # orderly; DESIGN section 5 knows no longer wait for a worker without work
CALL_TIMEOUT_S = 30.0  # the router's, where a call brings none: six leases
# Small frames and few slots, so that the short transfers of a soak are cut in pieces and wait for credits.
FRAME_BYTES, NUM_SLOTS = 64 << 10, 4
IDLE_GAUGES = (
    "num_running", "num_waiting", "active_blocks", "reserved_blocks", "num_tickets", "num_leases", "slots_in_use",
    "quarantined_slots",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
    """One worker id. `mortal`: killed and restarted; the others live as long as the soak, so that leaks can be measured."""

    worker_id: str
    role: str
    mortal: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """How a worker is started."""

    num_blocks: int
    ucx_tls: str = "all"
    new_address: bool = False


class SoakWorker:
    """One worker id through all its processes. `epoch` is 0 until the present process has announced itself."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.proxy = Proxy()
        self.process: subprocess.Popen[bytes] | None = None
        self.was_killed = False  # the present process, by us
        self.num_starts = 0
        self.num_blocks = 0
        self.record = control_pb2.WorkerRecord(worker_id=member.worker_id, state="starting")
        self.epoch = 0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        """To the present process; one that is gone already needs none."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


class SoakCluster(control_pb2_grpc.ControlServicer):
    """Args: worker_module is what `python -m` runs for a worker; `folder` takes configs and logs."""

    def __init__(
        self,
        members: Sequence[Member],
        worker_module: str,
        model_dir: Path,
        folder: Path,
        *,
        prefix_cache: bool,
        deterministic: bool = False,
    ) -> None:
        self.workers = {member.worker_id: SoakWorker(member) for member in members}
        self.findings: list[str] = []
        self.num_wrong_kv = 0  # steps of scripted runners that would have read it; known after `stop`
        self.grpc_port = self.http_port = 0
        self.report = control_pb2.RouterReport()
        self.num_reports = 0
        self._worker_module = worker_module
        self._model_dir = model_dir
        self._folder = folder
        self._engine = EngineConfig(
            chunk_tokens=64, max_num_seqs=16, num_threads=1, prefix_cache=prefix_cache, deterministic=deterministic
        )
        self._pids: set[int] = set()  # of all processes ever started here
        self._version = 0
        self._changed = asyncio.Event()
        self._server = grpc.aio.server()
        self._router: subprocess.Popen[bytes] | None = None
        self._shared_memory = SharedMemory()

    # --- life ---

    async def start(self, start: Start) -> None:
        control_pb2_grpc.add_ControlServicer_to_server(self, self._server)
        self._control_port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        for worker in self.workers.values():
            await worker.proxy.start()
            await self.start_worker(worker, start)
        config = RouterConfig(
            http_port=0,
            grpc_port=0,
            control_address=f"127.0.0.1:{self._control_port}",
            request_timeout_s=CALL_TIMEOUT_S,
            unavailable_wait_s=CALL_TIMEOUT_S / 3,
            shed_by_forecast=False,  # every call is to end, however long it takes here
            model=ModelConfig(path=str(self._model_dir)),
            log_level="warning",
        )
        self._router = self._spawn("router.main", "router", to_json(config), stdout=subprocess.PIPE)
        assert self._router.stdout is not None
        ready = json.loads(await asyncio.to_thread(self._router.stdout.readline))
        self.grpc_port, self.http_port = ready["grpc_port"], ready["http_port"]

    async def start_worker(self, worker: SoakWorker, start: Start) -> None:
        """Start a process for a worker that has none."""
        assert not worker.alive
        if start.new_address:
            await worker.proxy.close()
            worker.proxy = await Proxy().start()
        config = WorkerConfig(
            worker.member.worker_id,
            role=worker.member.role,
            control_address=f"127.0.0.1:{self._control_port}",
            model=ModelConfig(path=str(self._model_dir)),
            engine=dataclasses.replace(self._engine, num_blocks=start.num_blocks),
            kv=KVTransferConfig(ucx_tls=start.ucx_tls, frame_bytes=FRAME_BYTES, num_slots=NUM_SLOTS),
            log_level="warning",
        )
        worker.num_starts += 1
        worker.was_killed = False
        worker.epoch = 0
        worker.num_blocks = start.num_blocks
        name = f"{worker.member.worker_id}.{worker.num_starts}"
        worker.process = self._spawn(self._worker_module, name, to_json(config))

    def kill_worker(self, worker: SoakWorker) -> None:
        """SIGKILL, as the kernel or an operator would."""
        assert worker.process is not None
        worker.was_killed = True
        worker.process.kill()
        worker.process.wait()
        worker.proxy.backend = 0

    def _spawn(self, module: str, name: str, config: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        (self._folder / f"{name}.json").write_text(config)
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(self._folder / f"{name}.json")],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=stdout if stdout is not None else log,
                stderr=log,
            )
        self._pids.add(process.pid)
        return process

    async def stop(self) -> None:
        """End everything; a process that does not end in order, and with status 0, is a finding."""
        self.findings += self.deaths()
        await asyncio.to_thread(self._end_processes)
        await self._server.stop(None)
        for worker in self.workers.values():
            await worker.proxy.close()
        for log in sorted(self._folder.glob("*.log")):
            defects = list(_defects(log))
            self.num_wrong_kv += sum(line.startswith('{"fault"') for line in defects)
            self.findings += (f"{log.stem}: {line}" for line in defects)
        self.findings += (f"left behind: {name}" for name in self._shared_memory_left())

    def _end_processes(self) -> None:
        """The router first, as `baton up` does; then all workers at once."""
        workers = {name: worker.process for name, worker in self.workers.items() if worker.alive}
        for group in ({"router": self._router}, workers):
            for process in group.values():
                if process is not None:
                    process.send_signal(signal.SIGCONT)
                    process.terminate()
            for name, process in group.items():
                if process is not None:
                    self._await_end(name, process)

    def _await_end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        try:
            status = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.findings.append(f"{name} did not end within {STOP_S:g} s of SIGTERM")
            return
        finally:
            if process.stdout is not None:
                process.stdout.close()
        if status:
            self.findings.append(f"{name} ended with status {status}")

    def _shared_memory_left(self) -> list[str]:
        """POSIX files and SysV segments that no process uses any more; the files are removed."""
        files = self._shared_memory.unused()
        self._shared_memory.clean()
        with open("/proc/sysvipc/shm") as table:
            columns = next(table).split()
            segments = [dict(zip(columns, line.split(), strict=True)) for line in table]
        ours = [segment for segment in segments if int(segment["cpid"]) in self._pids]
        return [str(file) for file in files] + [f"SysV segment {segment['shmid']}" for segment in ours]

    # --- control.proto ---

    async def Announce(
        self, request: control_pb2.AnnounceRequest, context: object
    ) -> control_pb2.AnnounceResponse:  # fmt: skip
        record = request.worker
        worker = self.workers[record.worker_id]
        worker.proxy.backend = int(record.address.rpartition(":")[2])
        worker.record = control_pb2.WorkerRecord()
        worker.record.CopyFrom(record)
        worker.record.address = worker.proxy.address
        worker.record.state = "ready"
        worker.epoch = record.epoch
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
        return control_pb2.AnnounceResponse(role=record.role)

    async def Watch(
        self, request: control_pb2.WatchRequest, context: object
    ) -> AsyncIterator[control_pb2.ControlState]:  # fmt: skip
        while True:
            changed = self._changed
            records = [worker.record for worker in self.workers.values()]
            yield control_pb2.ControlState(workers=records, fleet_version=self._version)
            await changed.wait()

    async def Report(self, request: control_pb2.RouterReport, context: object) -> control_pb2.ReportResponse:
        self.report = request
        self.num_reports += 1
        return control_pb2.ReportResponse()

    async def Leave(self, request: object, context: object) -> control_pb2.LeaveResponse:
        raise AssertionError("nobody asks")

    async def Lenders(self, request: object, context: object) -> control_pb2.LendersResponse:
        return control_pb2.LendersResponse()

    # --- what is seen ---

    def deaths(self) -> list[str]:
        """Who ended without having been told to."""
        assert self._router is not None
        ended = {
            name: worker.process.returncode
            for name, worker in self.workers.items()
            if worker.process is not None and not worker.alive and not worker.was_killed
        }
        if self._router.poll() is not None:
            ended["router"] = self._router.returncode
        return [f"{name} died by itself with status {status}" for name, status in ended.items()]

    async def wait_announced(self) -> bool:
        """Returns whether every worker has come, with no death and within START_S."""
        deadline_s = time.monotonic() + START_S
        while late := [name for name, worker in self.workers.items() if not worker.epoch]:
            if self.deaths():
                return False
            if time.monotonic() > deadline_s:
                self.findings.append(f"not started within {START_S:g} s: {', '.join(late)}")
                return False
            await asyncio.sleep(0.05)
        return not self.deaths()

    def unrest(self) -> str:
        """What is not at rest by the router's last report; "" = every gauge is idle and every link is proved.

        An ejected worker rests, too: who failed again and again waits for up to a minute until it is tried (router/health.py).
        """
        views = {view.worker_id: view for view in self.report.workers}
        unrest = [f"{self.report.num_inflight} calls in flight"] if self.report.num_inflight else []
        for name, worker in self.workers.items():
            view = views.get(name)
            if view is None or view.epoch != worker.epoch or view.state not in ("ready", "ejected"):
                unrest.append(f"{name} is {view.state if view else 'unknown'}")
                continue
            unrest += (f"{name} {gauge} {value}" for gauge, value in _busy(view.load, worker.num_blocks))
            if worker.member.role == Role.PREFILL.name.lower():
                unrest += (f"{name} to {peer} is {state}" for peer, state in self._unproved(view))
        return ", ".join(unrest)

    def _unproved(self, view: control_pb2.WorkerView) -> Iterator[tuple[str, str]]:
        """Links that are not ready with the present process of each decode worker."""
        links = {link.peer.worker_id: link for link in view.links}
        for name, worker in self.workers.items():
            if worker.member.role == Role.DECODE.name.lower():
                link = links.get(name)
                if link is None or link.peer.epoch != worker.epoch or link.state != "ready":
                    yield name, f"{link.state} ({link.reason})" if link else "missing"

    def transports(self) -> set[str]:
        """Of the links that are up."""
        return {link.transport for view in self.report.workers for link in view.links if link.state == "ready"}

    def long_lived(self) -> dict[str, int]:
        """Pids of the processes that live as long as the soak, and of this one."""
        assert self._router is not None
        steady = {
            name: worker.process.pid
            for name, worker in self.workers.items()
            if worker.process is not None and not worker.member.mortal
        }
        return steady | {"router": self._router.pid, "driver": os.getpid()}


def _busy(load: worker_pb2.Load, num_blocks: int) -> Iterator[tuple[str, int]]:
    """Gauges that an idle worker must not show, and blocks that are neither free nor cached."""
    yield from ((gauge, value) for gauge in IDLE_GAUGES if (value := getattr(load, gauge)))
    if missing := num_blocks - load.free_blocks - load.cached_blocks:
        yield "missing blocks", missing


def _defects(log: Path) -> Iterator[str]:
    """Lines that a process without defects does not write: level error, faults of a scripted runner, stray tracebacks."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            if line.startswith("Traceback"):
                yield line
            continue
        if "fault" in entry or entry.get("level") in ("error", "critical"):
            yield line
