"""One router, assembled: what it is made of, in what order it starts and stops.

Ports are bound before anything runs, so a taken one is known at once. `drain`: unready, no new calls, running ones may end;
clients are told to take their connections elsewhere, and HTTP still answers who comes, to say so. `stop`: calls still running
end with an error that says so, connections close, Sessions close (workers then drop what this router left), threads stop.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import replace

from baton import clock
from baton.config import RouterConfig
from baton.errors import ConfigError
from baton.ids import new_router_epoch
from baton.log import get_log
from baton.model_files import ModelFiles
from baton.peer_trust import Part, PeerTrust
from baton.tracing import open_tracer
from router.batch.service import BatchService
from router.call import Calls
from router.chat_template import ChatTemplate
from router.control_client import ControlClient
from router.detokenizer import TokenTable
from router.fleet import Fleet
from router.grpc_api import GrpcServer, ServingApi
from router.http_server import HttpServer
from router.metrics import RouterMetrics
from router.openai_api import GenerationApi, build_app
from router.session import Liveness, SessionIdentity
from router.slo_watch import SloWatch
from router.tokenizer import Tokenizer
from router.validate import Limits

log = get_log("router.front_end")

READINESS_S = 0.25  # how often gRPC health follows the fleet: half a heartbeat


class FrontEnd:
    """Everything of one router process."""

    def __init__(self, config: RouterConfig, files: ModelFiles, workers: Sequence[str] = ()) -> None:
        """`workers`: addresses of a fixed fleet, for a router without a controller.

        Raises:
            ConfigError: a taken port, or files that cannot be used.
        """
        trust = PeerTrust(config.tls_dir, Part.ROUTER)
        epoch = new_router_epoch()
        router_id = f"{socket.gethostname()}-{os.getpid()}-{epoch:08x}"
        spec = replace(files.spec, name=config.model.served_name or files.spec.name)
        tokenizer_json = files.tokenizer_json.read_text(encoding="utf-8")
        table = TokenTable.from_tokenizer_json(tokenizer_json, spec.vocab_size)
        self.tokenizer = Tokenizer(tokenizer_json, table, _template(files, table))
        liveness = Liveness(config.heartbeat_s, config.missed_heartbeats)
        identity = SessionIdentity(router_id, epoch, trust, spec.tokenizer_hash)
        self.fleet = Fleet(
            identity,
            liveness,
            config.local_prefill_tokens,
            config.prefix_index_blocks,
            one_fabric=config.one_fabric,
        )
        self.slo_watch = SloWatch()
        self.metrics = RouterMetrics(self.fleet)
        limits = Limits(spec.name, spec.vocab_size, config.max_n, config.max_stop_strings)
        self._tracer = open_tracer(config.tracing, "router", router_id)
        self.calls = Calls(
            config, limits, self.tokenizer, self.fleet, self.slo_watch, self.metrics, epoch, self._tracer
        )  # fmt: skip
        generation = GenerationApi(spec.name, self.calls, config.client_backlog_bytes)
        self._batches = self._new_batches(config, generation)
        app = build_app(
            config, spec, self.calls, self.tokenizer, self.fleet, self.metrics, generation,
            self._batches.api if self._batches is not None else None,
        )  # fmt: skip
        self._http = [HttpServer(config, app)]
        try:
            if config.process_port:
                own = replace(config, http_port=config.process_port, shared_ports=False)
                self._http.append(HttpServer(own, app))
            self._grpc = GrpcServer(config, ServingApi(config, spec, self.calls, self.fleet))
        except ConfigError:
            for http in self._http:
                http.close()
            raise
        self.grpc_port, self.http_port = self._grpc.port, self._http[0].port
        self._workers = workers
        self._drain_s = config.drain_s
        self._control = (
            ControlClient(config.control_address, router_id, self.fleet, self.slo_watch, self.calls, trust)
            if config.control_address
            else None
        )
        self._readiness: asyncio.Task[None] | None = None
        self._keys: asyncio.Task[None] | None = None

    def _new_batches(self, config: RouterConfig, answers: GenerationApi) -> BatchService | None:
        """None: there is no folder for them."""
        if not (config.batch.enabled and config.batch.folder):
            return None
        calls, registry = self.calls, self.metrics.registry
        return BatchService(config.batch, answers, calls.slack, calls.tenant, registry, config.request_timeout_s)

    async def start(self) -> None:
        if self._control is not None:
            self._control.start()
        else:
            self.fleet.use_addresses(self._workers)
        self._readiness = asyncio.create_task(self._follow_readiness(), name="readiness")
        self._keys = asyncio.create_task(self.calls.keys.watch(), name="api keys")
        await self._grpc.start()
        for http in self._http:
            await http.start()
        if self._batches is not None:
            self._batches.start()
        log.info("router_started", http_port=self.http_port, grpc_port=self.grpc_port)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Take no more calls; return when none is running, after `drain_s`, or when `hurry` is set."""
        self.calls.close_door()
        if self._batches is not None:
            await self._batches.stop()
        await self._grpc.set_ready(False)
        self._grpc.leave()
        for http in self._http:
            http.leave()
        log.info("router_drains", num_inflight=self.calls.num_inflight)
        waits = [asyncio.create_task(self.calls.wait_idle()), asyncio.create_task(hurry.wait())]
        await asyncio.wait(waits, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def stop(self) -> None:
        if self._batches is not None:
            await self._batches.stop()
        self.calls.stop()
        await asyncio.gather(*(http.stop() for http in self._http), self._grpc.stop())
        if self._control is not None:
            await self._control.close()
        for task in (self._readiness, self._keys):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.fleet.close()
        self.tokenizer.close()
        await asyncio.to_thread(self._tracer.close)
        log.info("router_stopped")

    async def _follow_readiness(self) -> None:
        """Tell gRPC health what /readyz says, and let the fleet judge its workers."""
        while True:
            try:
                self.fleet.tick(clock.now_s())
                self.calls.costs.look(clock.now_s())
                await self._grpc.set_ready(not self.calls.unready_reason())
            except Exception:  # the loop of a task that nobody awaits: one bad look must not end all later ones
                log.exception("readiness_failed")
            await asyncio.sleep(READINESS_S)


def _template(files: ModelFiles, table: TokenTable) -> ChatTemplate | None:
    if not files.chat_template:
        return None
    spec = files.spec
    special = {"eos_token": spec.eos_token_ids[0] if spec.eos_token_ids else None, "bos_token": spec.bos_token_id}
    names = {name: table.name(token_id).decode() for name, token_id in special.items() if token_id is not None}
    return ChatTemplate(files.chat_template, names)
