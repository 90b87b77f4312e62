"""A worker without an engine: announces itself, answers heartbeats, drains, is tuned and changes its role. For the actor shell.

`model.path` says how it behaves: "busy" refuses to change its role; "working" has a sequence open until `finish`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from baton.config import WorkerConfig
from baton.errors import ConfigError
from baton.ids import new_epoch
from baton.request import Role
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.wire import PROTOCOL_VERSION


class StandInServer(worker_pb2_grpc.WorkerServicer):
    fingerprint = "stand-in"

    def __init__(self, config: WorkerConfig, on_fatal: Callable[[BaseException], None]) -> None:
        if os.path.exists(os.environ.get("STAND_IN_FAILS_WHILE_EXISTS", "")):
            raise ConfigError("model.path = 'x': no such model", field="model.path")
        self.epoch = new_epoch()
        self.busy = config.model.path == "busy"  # refuses to change its role
        self._config = config
        engine = config.engine
        self._most = worker_pb2.Tune(
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            chunk_tokens=engine.chunk_tokens,
        )
        self._load = worker_pb2.Load(
            role=worker_pb2.Role.ValueType(Role[config.role.upper()]),
            idle=config.model.path != "working",
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            chunk_tokens=engine.chunk_tokens,
        )
        self.heard_tunes: list[worker_pb2.Tune] = []
        self.is_deaf = False  # answers heartbeats, obeys nothing
        self._wants_drain = False
        self._stopping = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(max_workers=8))

    def start(self) -> int:
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"{self._config.host}:{self._config.port}")
        self._server.start()
        if self._config.control_address:
            self._announce(port)
        return port

    @property
    def draining(self) -> bool:
        return self._load.draining

    @property
    def role(self) -> Role:
        return Role(self._load.role)

    def finish(self) -> None:
        """What was open has ended; a flip that waited for it takes place."""
        self._load.idle = True
        if self._load.next_role:
            self._set_role(self._load.next_role)

    def hang_up(self) -> None:
        """Close each Session, until `pick_up`."""
        self._stopping.set()

    def pick_up(self) -> None:
        self._stopping.clear()

    def stop(self) -> None:
        self._stopping.set()
        self._server.stop(grace=None).wait()

    def Session(
        self, request_iterator: Iterator[worker_pb2.SessionRequest], context: Any
    ) -> Iterator[worker_pb2.SessionEvent]:
        for request in request_iterator:
            if self._stopping.is_set():
                return
            yield self._answer(request)

    def _answer(self, request: worker_pb2.SessionRequest) -> worker_pb2.SessionEvent:
        kind = request.WhichOneof("message")
        if kind == "tune":
            self.heard_tunes.append(request.tune)
        if self.is_deaf and kind in ("set_role", "tune", "drain"):
            return worker_pb2.SessionEvent(load=self._load)
        if kind == "open":
            opened = worker_pb2.Opened(
                worker_id=self._config.worker_id,
                epoch=self.epoch,
                role=self._load.role,
                load=self._load,
                max_model_len=128,
                num_blocks=64,
                block_size=16,
                max_num_seqs=8,
                most=self._most,
                protocol_version=PROTOCOL_VERSION,
            )
            return worker_pb2.SessionEvent(opened=opened)
        if kind == "set_role" and self.busy:
            error = worker_pb2.ErrorInfo(code="overloaded", message="2 sequences are open")
            return worker_pb2.SessionEvent(refused=worker_pb2.Refused(seq=0, error=error))
        if kind == "set_role":
            self._set_role(request.set_role.role)
        if kind == "tune" and request.tune.max_num_seqs > self._most.max_num_seqs:
            error = worker_pb2.ErrorInfo(
                code="invalid_request", message="max_num_seqs is too much", field="max_num_seqs"
            )
            return worker_pb2.SessionEvent(refused=worker_pb2.Refused(seq=0, error=error))
        if kind == "tune":
            self._load.max_num_seqs = request.tune.max_num_seqs
            self._load.max_num_batched_tokens = request.tune.max_num_batched_tokens
            self._load.chunk_tokens = request.tune.chunk_tokens
        if kind == "drain":
            self._wants_drain = request.drain.draining
            self._load.draining = self._wants_drain or bool(self._load.next_role)
        if kind == "heartbeat":
            reply = worker_pb2.HeartbeatReply(sent_ns=request.heartbeat.sent_ns, load=self._load)
            return worker_pb2.SessionEvent(heartbeat=reply)
        return worker_pb2.SessionEvent(load=self._load)

    def _set_role(self, role: worker_pb2.Role.ValueType) -> None:
        """At once, or, where something is open, after that: until then it drains."""
        if self._load.idle or role == self._load.role:
            self._load.role, self._load.next_role = role, worker_pb2.ROLE_UNSPECIFIED
            self._load.draining = self._wants_drain
        else:
            self._load.next_role, self._load.draining = role, True

    def _announce(self, port: int) -> None:
        record = control_pb2.WorkerRecord(
            worker_id=self._config.worker_id,
            epoch=self.epoch,
            address=f"{self._config.host}:{port}",
            role=self._load.role,
            pid=os.getpid(),
            fingerprint=self.fingerprint,
        )
        with grpc.insecure_channel(self._config.control_address) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            wanted = stub.Announce(control_pb2.AnnounceRequest(worker=record), timeout=10)
        self._load.role = wanted.role
        self._load.draining = self._wants_drain = wanted.draining
