"""Looks before anything is started: ports, certificates, how traces are sent, model files, memory, /dev/shm. Each failure is one
line that says what to do."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path

from baton.config import LOOPBACK, ClusterConfig
from baton.errors import ConfigError
from baton.kv_layout import DTYPE_BYTES
from baton.memory import available_memory_bytes
from baton.model_files import load_model_files
from baton.model_spec import ModelSpec
from baton.peer_trust import Part, PeerTrust
from baton.tracing import open_tracer
from cli.ports import listener_pid
from cli.processes import process_name
from engine.emulated_model import emulated_model
from engine.tensor_parallel.degree import check_shards, more_bytes

WORKER_PACKAGES = ("torch", "ucxx")  # of the extra "worker"

_MIB = 1 << 20
# Resident sizes measured on x86-64 Linux, 2 cores: Ray's head with raylet and agents 480 MiB, its node 200, controller 120,
# router 140; a worker beyond its weights and KV (Python, torch, UCX, buffers of the weights' conversion) 600.
_CLUSTER_BYTES = 800 * _MIB
_ROUTER_BYTES = 140 * _MIB
_WORKER_BYTES = 600 * _MIB
# Ray's two object stores (80 MB each, touched only when used) stay in /dev/shm, as do UCX's queues: 20 MiB per worker and peer
# at most.
_RAY_SHM_BYTES = 2 * 80_000_000
_UCX_SHM_BYTES = 20 * _MIB


def check_all(config: ClusterConfig) -> ModelSpec:
    """Return what the model is. Raises: ConfigError: the first thing that would make the start fail."""
    check_installed()
    for port, what, flag in (
        (config.router.http_port, "HTTP", "--http-port"),
        (config.router.grpc_port, "gRPC", "--grpc-port"),
        (config.controller.admin_port, "admin", "--admin-port"),
    ):
        check_port(port, what, flag)
    for part in Part:
        PeerTrust(config.tls_dir_of(part), part)
    open_tracer(config.tracing, "router", "check").close()
    spec = load_model_files(config.model.path).spec
    check_context(config, spec)
    check_shards(spec, config.engine.tensor_parallel_size)
    check_memory(config, spec, available_memory_bytes())
    check_shared_memory(config, _free_bytes(Path("/dev/shm")))
    return spec


def check_installed(packages: tuple[str, ...] = WORKER_PACKAGES) -> None:
    """Raises: ConfigError: Baton is here without what its workers run on, as in an image of the control plane."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not installed: workers cannot run here; pip install 'baton[worker]'",
            field="worker",
        )


def check_port(port: int, what: str, flag: str) -> None:
    """Raises: ConfigError: somebody listens there, or we may not."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen()
        except OSError as error:
            raise ConfigError(
                f"{what} port {port} cannot be used ({_taken_by(port, str(error.strerror))}); choose another with {flag}",
                field=flag,
            ) from None


def check_context(config: ClusterConfig, spec: ModelSpec) -> None:
    """Raises: ConfigError: more context is wanted than the model was made for."""
    emulation = config.emulation
    name, most = (emulation.model, emulation.max_model_len) if emulation.gpu else (spec.name, spec.max_model_len)
    if config.model.max_model_len > most:
        raise ConfigError(
            f"model.max_model_len = {config.model.max_model_len:,}: {name} was made for {most:,} tokens;"
            " lower --max-model-len, or leave it out to use them all",
            field="model.max_model_len",
        )


def check_memory(config: ClusterConfig, spec: ModelSpec, available: int) -> None:
    """Raises: ConfigError: weights and KV of all workers do not fit into `available` bytes."""
    num_workers = config.prefill + config.decode + config.both
    weights = 0
    if not config.emulation.gpu:
        weights = weight_bytes(spec.quantized(config.model.quantization), config.model.dtype)
        weights += more_bytes(spec, config.engine.tensor_parallel_size, DTYPE_BYTES[config.model.dtype])
    pools = (("prefill", config.prefill), ("decode", config.decode), ("both", config.both))
    kv = sum(size * _kv_bytes(config, role, spec) for role, size in pools)
    need = _CLUSTER_BYTES + config.router.processes * _ROUTER_BYTES + num_workers * (_WORKER_BYTES + weights) + kv
    if need > available:
        raise ConfigError(
            f"{num_workers} workers need about {need / 2**30:.1f} GiB of memory ({weights / 2**30:.1f} GiB weights each,"
            f" {kv / 2**30:.1f} GiB KV in all), {available / 2**30:.1f} GiB is available; lower"
            f" {'emulated KV with --kv-scale' if config.emulation.gpu else '--kv-memory-bytes'} or the number of workers",
            field="engine.kv_memory_bytes",
        )


def check_shared_memory(config: ClusterConfig, free: int) -> None:
    """Raises: ConfigError: /dev/shm cannot hold what Ray and UCX put there."""
    num_workers = config.prefill + config.decode + config.both
    need = _RAY_SHM_BYTES + num_workers * num_workers * _UCX_SHM_BYTES
    if need > free:
        raise ConfigError(
            f"/dev/shm has {free / _MIB:.0f} MiB free, {num_workers} workers need {need / _MIB:.0f} MiB; free some, or"
            f" enlarge it (docker run --shm-size={-(-need // _MIB) + 64}m)",
            field="/dev/shm",
        )


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Of a decoder-only transformer with gated FFN: embeddings, then per layer q, k, v, o and three FFN matrices.

    Left out: norms and biases, and the scales of int8 matrices, one number in some hundred bytes.
    """
    element_bytes = DTYPE_BYTES[dtype]
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tie_embeddings else 2)
    attention = 2 * spec.hidden_size * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
    projections = spec.num_layers * (attention + 3 * spec.hidden_size * spec.ffn_size)
    return embeddings * element_bytes + projections * (1 if spec.is_int8 else element_bytes)


def _kv_bytes(config: ClusterConfig, role: str, spec: ModelSpec) -> int:
    """Of one worker of that role."""
    engine = config.engine_of(role)
    if config.emulation.gpu:
        model = emulated_model(config.emulation)
        return (engine.num_blocks or model.num_blocks(engine.block_size)) * model.layout(engine.block_size).block_bytes
    return engine.kv_bytes(spec.kv_layout(engine.kv_dtype(config.model.dtype), engine.block_size).block_bytes)


def _free_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def _taken_by(port: int, otherwise: str) -> str:
    pid = listener_pid(port)
    return otherwise if pid is None else f"taken by pid {pid}: {process_name(pid)}"
