"""One worker process: builds the engine, the KV plane and the host, and serves them until stopped.

    threads: event loop (gRPC, roles)   engine (torch)   kv (UCX, copies of blocks that a transfer owns)

Used by the Ray actor (worker/actor.py) and by `python -m worker.main`. Start-up errors are ConfigErrors: one clear line.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from baton import clock, grpc_wakeups
from baton.config import WorkerConfig
from baton.errors import ConfigError
from baton.ids import new_epoch
from baton.kv_layout import KVLayout
from baton.log import get_log
from baton.model_spec import ModelSpec
from baton.peer_trust import Part, PeerTrust
from baton.tracing import Tracer, open_tracer
from baton.v1 import control_pb2, kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.wire import PROTOCOL_VERSION, layout_to_pb
from engine.engine import LocalEngine
from engine.loading.weight_manifest import WeightManifest
from kv_transfer.events import KVEvent
from kv_transfer.plane import KVPlane, make_transport
from worker.announcer import announce
from worker.emulation import emulated_link, load_emulated_model
from worker.host import RoleBuilder, WorkerHost
from worker.loading import Allocate, Borrow, LoadedModel, LoadModel, load_torch_model
from worker.session_service import SessionService
from worker.weight_borrower import borrow_weights
from worker.weight_hello import weight_hello
from worker.weight_lender import WeightLender

log = get_log("worker.server")

LOOPBACK_DEVICE = "lo"
CLOSED_NETWORK = "UCX knows no passwords: who reaches it may write this process's memory; docs/security.md"
STOP_GRACE_S = 1.0  # for streams to hear why they end; the Cancel bound of DESIGN section 5
# A Submit carries token ids, 5 bytes each at most: 16 MiB is above 3 million tokens; KV never rides in gRPC.
MAX_MESSAGE_BYTES = 16 << 20


def _load_builder(dotted: str) -> RoleBuilder:
    module, _, name = dotted.partition(":")
    try:
        builder: RoleBuilder = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"role {dotted} cannot be loaded: {error}", field="role") from error
    return builder


def load_model(config: WorkerConfig, allocate: Allocate, borrow: Borrow | None = None) -> LoadedModel:
    """Load what the configuration names: a model, or the emulation of one. Raises: ConfigError."""
    if config.emulation.gpu:
        return load_emulated_model(config, allocate)
    return load_torch_model(config, allocate, borrow)


@dataclass(frozen=True, slots=True)
class _StartUp:
    """What is told of a start."""

    weights_from: str  # LoadedModel's, as the next
    weights_s: float
    began_s: float  # clock.now_s


class WorkerServer:
    """A worker as a thing to start and stop, from any thread but its own."""

    def __init__(
        self,
        config: WorkerConfig,
        on_fatal: Callable[[BaseException], None] | None = None,
        load: LoadModel | None = None,
    ) -> None:
        """`load`: another way to a model than the configured one."""
        self._config = config
        self._load = load
        self._on_fatal_user = on_fatal
        self.epoch = new_epoch()
        self.port = 0
        self.fingerprint = ""
        self._loop = clock.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._stop = asyncio.Event()
        self._lender: WeightLender | None = None

    @property
    def address(self) -> str:
        return f"{self._config.host}:{self.port}"

    def start(self) -> int:
        """Return the bound port once the worker answers.

        Raises:
            ConfigError: the model, memory, port or transport is not to be had; the message says what to do.
        """
        self._thread.start()
        patience_s = self._config.start_timeout_s + clock.real_s(self._config.emulation.start_s)
        if not self._started.wait(patience_s):
            raise ConfigError(
                f"worker {self._config.worker_id} did not start within {patience_s:g} s; raise start_timeout_s"
            )
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error
        return self.port

    def drain(self, hurry: threading.Event, grace_s: float) -> bool:
        """Take no new work; return once nothing is open, after `grace_s`, or when `hurry` is set. Whether nothing was open.

        Not from the loop's thread. What is open after it ends as UNAVAILABLE with its router's Session when `stop` comes.
        """
        try:
            drained = asyncio.run_coroutine_threadsafe(self._host.drain(), self._loop)
        except RuntimeError:  # the loop has ended by itself
            return True
        drained.add_done_callback(lambda _: hurry.set())
        hurry.wait(clock.real_s(grace_s))
        is_idle = drained.done()
        drained.cancel()
        log.info("worker_drained", worker=self._config.worker_id, is_idle=is_idle)
        return is_idle

    def stop(self) -> None:
        """End streams, threads and the transport; returns when nothing is left."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it is ending by itself and has closed its loop
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    # --- the loop's thread ---

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            if not self._started.is_set():
                self._start_error = error
                self._started.set()
            else:
                log.exception("worker_failed")
                self._on_fatal(error)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _on_fatal(self, error: BaseException) -> None:
        if self._stop.is_set():
            return  # ending already: one report is enough
        self._stop.set()
        if self._on_fatal_user is not None:
            self._on_fatal_user(error)

    async def _serve(self) -> None:
        config = self._config
        started_s = clock.now_s()
        trust = PeerTrust(config.tls_dir, Part.WORKER)
        tracer = open_tracer(config.tracing, "worker", config.worker_id)
        try:
            await self._serve_traced(trust, tracer, started_s)
        finally:
            await self._loop.run_in_executor(None, tracer.close)

    async def _serve_traced(self, trust: PeerTrust, tracer: Tracer, started_s: float) -> None:
        config = self._config
        if config.kv.transport == "ucx" and config.kv.ucx_net_devices != LOOPBACK_DEVICE:
            log.warning("kv_network_must_be_closed", devices=config.kv.ucx_net_devices, hint=CLOSED_NETWORK)
        with contextlib.ExitStack() as not_started:
            transport = make_transport(config.kv, f"{self.epoch:016x}")
            if config.emulation.gpu:
                transport = emulated_link(config, transport)
            not_started.callback(transport.close)
            model = await self._loaded(transport.allocate, trust)
            not_started.callback(model.others.close)
            kv_cache = model.runner.kv_cache
            self.fingerprint = model.spec.fingerprint
            engine = LocalEngine(
                config.engine,
                model.runner,
                fingerprint=self.fingerprint,
                eos_token_ids=model.spec.eos_token_ids,
                max_model_len=max_model_len(config, model.spec),
            )
            plane = KVPlane(
                kv_cache, config.kv, self.epoch, self._forward_kv_event, transport, self._forward_kv_failure
            )
            plane.start()
            not_started.pop_all()  # the plane closes its transport
        try:
            self._host = WorkerHost(
                config,
                self._identity(model.spec, kv_cache.layout, kv_cache.num_blocks),
                self._hello(model.spec, plane.address, layout_to_pb(kv_cache.layout)),
                engine,
                plane,
                _load_builder(config.prefill_role),
                _load_builder(config.decode_role),
                self._loop,
                self._on_fatal,
                trust,
                model.lateness,
                tracer,
            )
            if model.lendable is not None:
                hello = weight_hello(config, model.spec, model.lendable.manifest, self.epoch, plane.address)
                self._lender = WeightLender(hello, model.lendable.pages, plane, config.kv, trust)
            model.others.watch(self._forward_fatal)
            await self._serve_host(self._host, trust, _StartUp(model.weights_from, model.weights_s, started_s))
        finally:
            await self._loop.run_in_executor(None, plane.stop)
            await self._loop.run_in_executor(None, model.others.close)

    async def _loaded(self, allocate: Allocate, trust: PeerTrust) -> LoadedModel:
        """Load on a thread of its own, as borrowed weights come through this loop; one that no exit of the process waits for."""
        config, loaded = self._config, concurrent.futures.Future[LoadedModel]()

        def borrow(spec: ModelSpec, manifest: WeightManifest, buffer: mmap.mmap) -> bool:
            borrowing = borrow_weights(config, spec, manifest, buffer, trust)
            return asyncio.run_coroutine_threadsafe(borrowing, self._loop).result()

        def load() -> None:
            try:
                chosen: LoadModel = self._load or partial(load_model, borrow=borrow)
                loaded.set_result(chosen(config, allocate))
            except BaseException as error:  # noqa: BLE001  raised again where it is waited for
                loaded.set_exception(error)

        threading.Thread(target=load, name="load", daemon=True).start()
        return await asyncio.wrap_future(loaded)

    def _forward_fatal(self, error: BaseException) -> None:
        """From any thread; nobody waits for it once the loop has closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_fatal, error)

    def _forward_kv_event(self, event: KVEvent) -> None:
        """Called on the KV thread, which ends before the loop does."""
        self._loop.call_soon_threadsafe(self._on_kv, event)

    def _on_kv(self, event: KVEvent) -> None:
        if self._lender is None or not self._lender.on_kv(event):
            self._host.on_kv(event)

    def _forward_kv_failure(self, error: Exception) -> None:
        """Like _forward_kv_event."""
        self._loop.call_soon_threadsafe(self._on_fatal, error)

    async def _serve_host(self, host: WorkerHost, trust: PeerTrust, start_up: _StartUp) -> None:
        grpc_wakeups.never_block()
        config = self._config
        server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)]
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(SessionService(host, trust), server)
        kv_pb2_grpc.add_KvLinkServicer_to_server(host.links, server)
        if self._lender is not None:
            kv_pb2_grpc.add_KvWeightsServicer_to_server(self._lender, server)
        checks = HealthServicer()
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        try:
            self.port = trust.listen(server, config.host, config.port)
        except RuntimeError as error:
            raise ConfigError(f"port {config.port} is in use; choose another worker port", field="port") from error
        host.start()
        try:
            await server.start()
            start_s = clock.now_s() - start_up.began_s
            announcer = asyncio.create_task(self._announce(host, trust, start_up, start_s), name="announce")
            log.info(
                "worker_ready", worker=config.worker_id, address=self.address, role=config.role, start_s=round(start_s, 3),
                weights_from=start_up.weights_from, weights_s=round(start_up.weights_s, 3),
            )  # fmt: skip
            self._started.set()
            await self._stop.wait()
            announcer.cancel()
            await asyncio.gather(announcer, return_exceptions=True)
        finally:
            await asyncio.gather(server.stop(STOP_GRACE_S), host.stop())  # the server first: nobody may come back

    async def _announce(self, host: WorkerHost, trust: PeerTrust, start_up: _StartUp, start_s: float) -> None:
        """Tell the controller where we are, as long as we serve."""
        config = self._config

        def record() -> control_pb2.WorkerRecord:
            return control_pb2.WorkerRecord(
                worker_id=config.worker_id,
                epoch=self.epoch,
                address=self.address,
                role=worker_pb2.Role.ValueType(host.role),
                pid=os.getpid(),
                state="ready",
                fingerprint=self.fingerprint,
                weights_from=start_up.weights_from,
                weights_s=start_up.weights_s,
                start_s=start_s,
            )

        if config.control_address:
            await announce(config.control_address, record, host.adopt_wishes, trust)

    # --- who we are ---

    def _identity(self, spec: ModelSpec, layout: KVLayout, num_blocks: int) -> worker_pb2.Opened:
        config = self._config
        return worker_pb2.Opened(
            worker_id=config.worker_id,
            epoch=self.epoch,
            model=config.model.served_name or spec.name,
            fingerprint=spec.fingerprint,
            max_model_len=max_model_len(config, spec),
            num_blocks=num_blocks,
            block_size=layout.block_size,
            max_num_seqs=config.engine.max_num_seqs,
            kv_dtype=layout.dtype,
            kv_block_bytes=layout.block_bytes,
            fabric=config.fabric,
            weights_hash=spec.weights_hash,
            tokenizer_hash=spec.tokenizer_hash,
        )

    def _hello(self, spec: ModelSpec, address: bytes, layout: kv_pb2.KvLayout) -> kv_pb2.Hello:
        kv = self._config.kv
        return kv_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self._config.worker_id,
            epoch=self.epoch,
            ucx_address=address,
            weights_hash=spec.weights_hash,
            tokenizer_hash=spec.tokenizer_hash,
            rope=spec.rope,
            quantization=spec.quantization,
            speculation=self._config.engine.speculation,
            fingerprint=spec.fingerprint,
            numerics=spec.numerics,
            layout=layout,
            tp_rank=0,
            tp_size=1,
            frame_bytes=kv.frame_bytes,
            num_slots=kv.num_slots,
            require_rdma=kv.require_rdma,
            transport_kind=kv.transport,
        )


def max_model_len(config: WorkerConfig, spec: ModelSpec) -> int:
    """The context limit: the model's own, or the smaller one configured."""
    return min(config.model.max_model_len or spec.max_model_len, spec.max_model_len)
