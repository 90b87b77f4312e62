"""Settings from their four sources, merged once: defaults <- YAML file <- environment <- flags.

A setting is named by its dotted path in `ClusterConfig` ("router.http_port"); in the environment that is
BATON__ROUTER__HTTP_PORT. Every value remembers where it came from (`baton up --print-config`), is checked against its
type and its limit, and a wrong one is refused with value, limit and reason. An unknown name is refused with the nearest
known one. `kv.ucx` is a map: its names are UCX's, in capitals, and UCX itself refuses those that it does not know.

Also hands configs to child processes: `to_json` and `from_json`. Reads nothing at import, never mutates a config.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import yaml

from baton import tracing
from baton.config import KV_DTYPE_ALIASES, MAX_FRAME_BYTES, MAX_NUM_SLOTS, ClusterConfig, EmulationConfig
from baton.database_url import without_password
from baton.errors import ConfigError
from baton.kv_layout import wire_dtype

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Scalar = str | int | float | bool
ENV_PREFIX = "BATON__"
DEFAULT = "default"  # the origin of what nobody set
_MAP = "kv.ucx"  # the one setting that is a map of names to text
_UCX_NAME = re.compile(r"(?!UCX_)[A-Z][A-Z0-9_]*")
_UCX_TAKEN = {"TLS": "kv.ucx_tls", "NET_DEVICES": "kv.ucx_net_devices"}  # options that have a setting of their own
_UCX_BOOLS = {True: "y", False: "n"}
# From `model.`, `tracing.`, `tls_dir` and `controller.database`, so that the parts cannot disagree.
_DERIVED = ("router.model.", "router.tracing.", "router.tls_dir", "router.batch.database")
# OpenTelemetry's own name for a setting of ours, where it means gRPC. OTEL_EXPORTER_OTLP_ENDPOINT, which platforms set for
# whoever runs on them, and mostly for OTLP over HTTP, turns nothing on here. Other variables are the SDK's to read.
_OTEL_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_OTEL_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")  # the first one holds


@dataclass(frozen=True, slots=True)
class Limit:
    """What a value may be, and why."""

    why: str
    low: float = float("-inf")
    high: float = float("inf")
    choices: tuple[str, ...] = ()

    def allows(self, value: Scalar) -> bool:
        return value in self.choices if isinstance(value, str) else self.low <= value <= self.high

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.high == float("inf"):
            return f"at least {_plain(self.low)}"
        return f"between {_plain(self.low)} and {_plain(self.high)}"


def _plain(number: float) -> str:
    """Digits as one would type them: 1048576, 0.01."""
    return str(int(number)) if number == int(number) else str(number)


_DTYPES = ("float32", "bfloat16", "float16")
_KV_DTYPES = ("auto", *_DTYPES, "float8_e4m3", *KV_DTYPE_ALIASES)
_EMULATED_DTYPES = ("fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4")
_PORT = Limit("a TCP port; 0 lets the system pick one", 0, 65_535)
# The largest fleet that was measured has 1,000 (docs/router_cost.md), and what a controller keeps of two pools of that size fits
# into a ConfigMap (test_kube_documents.py). What one machine can hold says Ray's accounting (controller.worker_num_cpus)
_WORKERS = Limit("workers of one role", 0, 1_000)
_PODS = Limit("pods of one pool; a maximum of 0 = none", 0, 100_000)
_DRAIN = Limit("0 = do not wait for running calls", 0, 86_400)
_SECONDS = Limit("a wait must end", 0.01, 86_400)
_DELAY = Limit("0 = at once", 0, 86_400)
_COUNT = Limit("nothing can be served with less", 1)
_LOG = Limit("log levels", choices=("debug", "info", "warning", "error"))
_LIMITS: Mapping[str, Limit] = {
    "prefill": _WORKERS,
    "decode": _WORKERS,
    "both": _WORKERS,
    "decode_kv_cache_dtype": Limit("auto = engine.kv_cache_dtype", choices=_KV_DTYPES),
    "model.dtype": Limit("the compute dtypes of the engine", choices=_DTYPES),
    "model.quantization": Limit(
        "auto = as the files have them, int8 = at loading; weights of other kinds come in GGUF files",
        choices=("auto", "int8"),
    ),
    "model.max_model_len": Limit("tokens; 0 = the model's own", 0),
    "model.weights_from": Limit("a live worker that has them, else the files", choices=("auto", "files")),
    "engine.block_size": Limit("tokens per block", 1, 256),
    "engine.num_blocks": Limit("0 = from engine.kv_memory_bytes", 0),
    "engine.kv_memory_bytes": Limit("one block of a small model takes about 1 MiB", 1 << 20),
    "engine.kv_cache_dtype": Limit("auto = the compute dtype", choices=_KV_DTYPES),
    "engine.max_num_seqs": _COUNT,
    "engine.max_num_batched_tokens": _COUNT,
    "engine.chunk_tokens": _COUNT,
    "engine.tensor_parallel_size": Limit("processes of one worker, on one host", 1, 64),
    "engine.num_threads": Limit("0 = cores / workers on this host", 0, 1_024),
    "engine.max_queued_seqs": _COUNT,
    "engine.speculation": Limit("the engine does not guess ahead yet", choices=("",)),
    "kv.transport": Limit("loopback is for tests in one process", choices=("ucx", "loopback")),
    "kv.mode": Limit("whether peers may, or must, read blocks in place", choices=("auto", "staged", "direct")),
    "kv.frame_bytes": Limit("a frame holds its header and at least one block of one layer", 64 << 10, MAX_FRAME_BYTES),
    "kv.num_slots": Limit("one is written while another is verified", 2, MAX_NUM_SLOTS),
    "kv.lease_s": _SECONDS,
    "kv.transfer_timeout_s": _SECONDS,
    "kv.hello_timeout_s": _SECONDS,
    "kv.quiet_s": _SECONDS,
    "kv.max_resends": Limit("0 = fail at the first damaged frame", 0, 100),
    "emulation.weight_dtype": Limit("as engine/timing/hardware.py names them", choices=_EMULATED_DTYPES),
    "emulation.kv_dtype": Limit("as engine/timing/hardware.py names them", choices=_EMULATED_DTYPES),
    "emulation.tp": Limit("GPUs of one worker", 1, 1_024),
    "emulation.time_scale": Limit("below 1 the CPUs would have to outrun the GPUs", 1, 10_000),
    "emulation.kv_scale": Limit("bytes of KV timed for each one moved", 1, 1 << 20),
    "emulation.memory_ratio": Limit("a part of the GPUs' memory", 0.01, 1),
    "emulation.max_model_len": _COUNT,
    "emulation.start_s": _DELAY,
    "emulation.flip_s": _DELAY,
    "emulation.failure_mean_s": Limit("0 = workers never die", 0, 31_536_000),
    "emulation.failure_seed": Limit("seeds are whole numbers from 0", 0),
    "tracing.callers": Limit("what becomes of callers' traces", choices=tracing.CALLERS),
    "tracing.sample_ratio": Limit("a part of all calls", 0, 1),
    "router.http_port": _PORT,
    "router.grpc_port": _PORT,
    "router.processes": Limit("each takes a core when busy", 1, 64),
    "router.process_port": _PORT,
    "router.max_inflight": _COUNT,
    "router.max_queued": Limit("0 = who cannot start at once is turned away", 0),
    "router.max_queued_tokens": _COUNT,
    "router.queue_window_s": Limit("-1 = learned, 0 = a worker gets work once it has none", -1, 10),
    "router.request_timeout_s": _SECONDS,
    "router.unavailable_wait_s": Limit("0 = fail at once", 0, 86_400),
    "router.heartbeat_s": _SECONDS,
    "router.missed_heartbeats": _COUNT,
    "router.max_body_bytes": Limit("a chat call needs a few KiB; more than 1 GiB is memory given away", 4_096, 1 << 30),
    "router.max_stop_strings": Limit("0 = stop strings are refused", 0, 1_024),
    "router.max_n": Limit("answers to one prompt", 1, 128),
    "router.local_prefill_tokens": Limit("0 = never, -1 = one chunk", -1),
    "router.prefix_index_blocks": Limit("each takes up to 30 bytes of the router", 1, 1_000_000_000),
    "router.max_connection_age_s": _SECONDS,
    "router.client_backlog_bytes": Limit("one event takes up to 3 KiB", 4_096, 1 << 30),
    "router.drain_s": _DRAIN,
    "router.batch.max_file_bytes": Limit("a line needs a few hundred bytes", 4_096, 1 << 40),
    "router.batch.max_lines": _COUNT,
    "router.batch.max_files": _COUNT,
    "router.batch.max_tenant_bytes": _COUNT,
    "router.batch.max_bytes": _COUNT,
    "router.batch.max_batches": _COUNT,
    "router.batch.max_running_batches": _COUNT,
    "router.batch.max_running_lines": _COUNT,
    "router.batch.keep_s": Limit("a batch runs for a day", 86_400),
    "router.batch.lease_s": _SECONDS,
    "router.cost.usd_per_gpu_hour": Limit("0 = not known", 0, 10_000),
    "router.cost.gpus_per_worker": Limit("GPUs of one worker", 1, 1_024),
    "router.time_scale": Limit("below 1 the CPUs would have to outrun the GPUs", 1, 10_000),
    "router.log_level": _LOG,
    "controller.admin_port": _PORT,
    "controller.control_port": _PORT,
    "controller.worker_start_timeout_s": _SECONDS,
    "controller.heartbeat_s": _SECONDS,
    "controller.missed_heartbeats": _COUNT,
    "controller.mode": Limit("how far the autoscaler may go", choices=("", "auto", "advisory", "frozen")),
    "controller.max_gpus": Limit("0 = as the database has it", 0, 100_000),
    "controller.standby": _WORKERS,
    "controller.tick_s": _SECONDS,
    "controller.dwell_s": _DELAY,
    "controller.shrink_after_s": _DELAY,
    "controller.planner_seconds": Limit("an operator waits for it", 0.1, 600),
    "controller.pd_period_s": Limit("each takes a simulation", 1, 86_400),
    "controller.worker_num_cpus": Limit("of Ray's accounting", 0.001, 1_024),
    "controller.log_level": _LOG,
    "kubernetes.mode": Limit("what sizes pools", choices=("statefulset", "kuberay", "external")),
    "kubernetes.scaler": Limit("who decides on sizes", choices=("slo", "hpa", "none")),
    "kubernetes.worker_port": _PORT,
    "kubernetes.gpus_per_worker": Limit("0 = workers without GPUs", 0, 1_024),
    "kubernetes.prefill_min": _PODS,
    "kubernetes.prefill_max": _PODS,
    "kubernetes.decode_min": _PODS,
    "kubernetes.decode_max": _PODS,
    "kubernetes.both_min": _PODS,
    "kubernetes.both_max": _PODS,
    **{f"kubernetes.{pool}_cores": Limit("of one pod", 1, 1_024) for pool in ("prefill", "decode", "both")},
    **{f"kubernetes.{pool}_drain_s": _DRAIN for pool in ("prefill", "decode", "both")},
    "kubernetes.pending_s": _SECONDS,
    "kubernetes.sick_s": _SECONDS,
    "kubernetes.slo_source": Limit("who owns SLO classes", choices=("live", "values")),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A cluster's settings and the source of each: "default", "file x.yaml", "env BATON__...", "flag --...."""

    config: ClusterConfig
    origins: Mapping[str, str]  # by dotted path; those of derived settings are absent

    def describe(self) -> Iterator[str]:
        """Yield "path = value  # origin" lines in the order of the dataclasses."""
        values = {
            path: without_password(value) if isinstance(value, str) else value for path, value in _leaves(self.config)
        }
        width = max(len(f"{path} = {json.dumps(values[path])}") for path in self.origins)
        for path, origin in self.origins.items():
            yield f"{f'{path} = {json.dumps(values[path])}':<{width}}  # {origin}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value before it is checked. `text` is what an environment or a command line can say."""

    path: str
    value: object
    origin: str
    text: bool = False


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, tuple[str, object]]) -> Loaded:
    """Merge the sources, the later the stronger.

    Args:
        flags: dotted path -> (the flag as typed, its value); only those that were given.

    Raises:
        ConfigError: the file cannot be read, or a name or value is wrong; `field` is the dotted path.
    """
    types = {path: kind for path, kind in _leaf_types(ClusterConfig) if not path.startswith(_DERIVED)}
    values: dict[str, Scalar] = {path: value for path, value in _leaves(ClusterConfig()) if path in types}
    origins = dict.fromkeys(values, DEFAULT)
    for setting in (*_from_file(file), *_from_environ(environ), *_from_flags(flags)):
        path, value = _checked_ucx(setting) if _is_ucx(setting) else (setting.path, _checked(setting, types))
        values[path] = value
        origins[path] = setting.origin
    cluster = _build(ClusterConfig, _nested(values))
    router = dataclasses.replace(
        cluster.router, model=cluster.model, tracing=cluster.tracing, tls_dir=cluster.tls_dir_of("router")
    )
    cluster = dataclasses.replace(cluster, router=router)
    _check_together(cluster)
    return Loaded(cluster, origins)


def to_json(config: DataclassInstance) -> str:
    """Write any config dataclass, for `from_json` in another process."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(kind: type[T], text: str) -> T:
    """Rebuild a config that `to_json` wrote.

    Raises:
        ConfigError: not JSON, an unknown or missing name, a wrong type.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the {kind.__name__} handed over is not JSON: {error}") from error
    return _build(kind, data)


def _from_file(file: Path | None) -> Iterator[Setting]:
    if file is None:
        return
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", field="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}", field="config") from error
    if data is None:
        return
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a mapping such as 'router: {{http_port: 8000}}'", field="config")
    for path, value in _flatten(data):
        yield Setting(path, value, f"file {file.name}")


def _from_environ(environ: Mapping[str, str]) -> Iterator[Setting]:
    protocol = next((told for name in _OTEL_PROTOCOLS if (told := environ.get(name))), "grpc")
    if protocol == "grpc" and (endpoint := environ.get(_OTEL_ENDPOINT)):
        yield Setting("tracing.endpoint", endpoint, f"env {_OTEL_ENDPOINT}", text=True)
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX):
            path = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            yield Setting(path, environ[name], f"env {name}", text=True)


def _from_flags(flags: Mapping[str, tuple[str, object]]) -> Iterator[Setting]:
    for path, (flag, value) in flags.items():
        yield Setting(path, value, f"flag {flag}")


def _flatten(data: Mapping[object, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _nested(values: Mapping[str, Scalar]) -> dict[str, object]:
    """{"a.b": 1} -> {"a": {"b": 1}}."""
    root: dict[str, object] = {}
    for path, value in values.items():
        *parents, leaf = path.split(".")
        node = root
        for parent in parents:
            child = node.setdefault(parent, {})
            assert isinstance(child, dict), path
            node = child
        node[leaf] = value
    return root


def _leaf_types(kind: type[DataclassInstance], prefix: str = "") -> Iterator[tuple[str, type]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _leaf_types(hint, f"{prefix}{field.name}.")
        elif f"{prefix}{field.name}" != _MAP:
            yield f"{prefix}{field.name}", hint


def _leaves(config: DataclassInstance, prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _leaves(value, f"{prefix}{field.name}.")
        elif isinstance(value, Mapping):
            yield from ((f"{prefix}{field.name}.{name}", value[name]) for name in value)
        else:
            yield f"{prefix}{field.name}", value


def _checked(setting: Setting, types: Mapping[str, type]) -> Scalar:
    kind = types.get(setting.path)
    if kind is None:
        raise ConfigError(_unknown(setting, types), field=setting.path)
    value = _parsed(str(setting.value), kind) if setting.text else _typed(setting.value, kind)
    where = f"{setting.path} = {without_password(repr(setting.value))} (from {setting.origin})"
    if value is None:
        raise ConfigError(f"{where}: must be {_KIND_NAMES[kind]}", field=setting.path)
    limit = _LIMITS.get(setting.path)
    if limit is not None and not limit.allows(value):
        raise ConfigError(f"{where}: must be {limit} ({limit.why})", field=setting.path)
    return value


def _is_ucx(setting: Setting) -> bool:
    return setting.path.startswith(f"{_MAP}.")


def _checked_ucx(setting: Setting) -> tuple[str, str]:
    """The path, with the option's name in UCX's capitals, and the value as UCX reads it."""
    name, value = setting.path.removeprefix(f"{_MAP}.").upper(), setting.value
    path = f"{_MAP}.{name}"
    where = f"{path} = {value!r} (from {setting.origin})"
    if not _UCX_NAME.fullmatch(name):
        hint = "leave out the prefix UCX_" if name.startswith("UCX_") else "a name is letters, digits and _"
        raise ConfigError(f"{where}: is no name of a UCX option; {hint}", field=path)
    if name in _UCX_TAKEN:
        raise ConfigError(f"{where}: set {_UCX_TAKEN[name]} instead", field=path)
    if isinstance(value, bool):
        value = _UCX_BOOLS[value]
    if not isinstance(value, str | int | float) or not str(value):
        raise ConfigError(f"{where}: must be text or a number", field=path)
    return path, str(value)


_KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _typed(value: object, kind: type) -> Scalar | None:
    """`value` as `kind`, None where it is something else; a whole number is also a number, a bool is neither."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool) and kind is not bool:
        return None
    return value if isinstance(value, kind) and isinstance(value, str | int | float | bool) else None


def _parsed(text: str, kind: type) -> Scalar | None:
    if kind is bool:
        return _BOOLS.get(text.lower())
    try:
        return int(text) if kind is int else float(text) if kind is float else text
    except ValueError:
        return None


def _unknown(setting: Setting, types: Mapping[str, type]) -> str:
    if setting.path.startswith(_DERIVED):
        followed = "controller.database" if "database" in setting.path else setting.path.removeprefix("router.")
        return f"{setting.path} (from {setting.origin}) follows {followed}; set that one"
    sections = {path.rpartition(".")[0] for path in types} - {""} | {_MAP}
    if setting.path in sections:
        return f"{setting.path} (from {setting.origin}) is a section; set names in it, such as {setting.path}.*"
    near = difflib.get_close_matches(setting.path, types, n=1, cutoff=0.0)
    return f"{setting.path} (from {setting.origin}) is no setting; the nearest known is {near[0]}"


def _check_together(cluster: ClusterConfig) -> None:
    """What no single value can show."""
    if cluster.both == 0 and (cluster.prefill == 0 or cluster.decode == 0):
        raise ConfigError(
            f"prefill = {cluster.prefill}, decode = {cluster.decode}, both = 0: an answer needs a prefill and a decode"
            " worker, or one that does both (--colocated)",
            field="prefill",
        )
    for path, port in _ports(cluster).items():
        twins = [other for other, its_port in _ports(cluster).items() if port and its_port == port and other != path]
        if twins:
            raise ConfigError(f"{path} and {twins[0]} are both {port}: each needs a port of its own", field=path)
    if cluster.kv.require_rdma and cluster.kv.transport != "ucx":
        raise ConfigError(
            f"kv.require_rdma is set, but kv.transport = {cluster.kv.transport} has no RDMA: use ucx",
            field="kv.require_rdma",
        )
    _check_decode_dtype(cluster)
    _check_tensor_parallel(cluster)
    _check_emulation(cluster.emulation)
    tracing.check(cluster.tracing)
    if cluster.router.time_scale not in (1, cluster.emulation.time_scale):
        raise ConfigError(
            f"router.time_scale = {cluster.router.time_scale:g}: all of a cluster goes by one clock; set emulation.time_scale",
            field="router.time_scale",
        )
    engine = cluster.engine
    if engine.chunk_tokens > engine.max_num_batched_tokens:
        raise ConfigError(
            f"engine.chunk_tokens = {engine.chunk_tokens}: must be at most engine.max_num_batched_tokens"
            f" = {engine.max_num_batched_tokens} (a chunk has to fit in a step)",
            field="engine.chunk_tokens",
        )


def _check_emulation(emulation: EmulationConfig) -> None:
    """A real cluster that took an emulated one's times would be slow in some of its processes and not in others."""
    plain = EmulationConfig()
    for name in ("time_scale", "start_s", "flip_s", "failure_mean_s"):
        value = getattr(emulation, name)
        if not emulation.gpu and value != getattr(plain, name):
            raise ConfigError(
                f"emulation.{name} = {value:g}: it means nothing for real GPUs; set emulation.gpu (--emulate), or leave it out",
                field=f"emulation.{name}",
            )


def _check_tensor_parallel(cluster: ClusterConfig) -> None:
    size = cluster.engine.tensor_parallel_size
    if size == 1:
        return
    where = f"engine.tensor_parallel_size = {size}"
    if cluster.emulation.gpu:
        raise ConfigError(
            f"{where}: the emulated GPUs of a worker are emulation.tp (--tp)", field="engine.tensor_parallel_size"
        )
    if cluster.kv.mode == "direct":
        raise ConfigError(
            f"{where}: ranks share their KV among themselves, not with peers, so kv.mode cannot be direct; leave it at auto",
            field="kv.mode",
        )


def _check_decode_dtype(cluster: ClusterConfig) -> None:
    if cluster.decode_kv_cache_dtype == "auto":
        return
    where = f"decode_kv_cache_dtype = {cluster.decode_kv_cache_dtype!r}"
    if cluster.decode == 0:
        raise ConfigError(f"{where}: there is no decode pool; set engine.kv_cache_dtype", field="decode_kv_cache_dtype")
    sent, kept = (cluster.engine_of(role).kv_dtype(cluster.model.dtype) for role in ("prefill", "decode"))
    if wire_dtype(sent, kept) is None:
        raise ConfigError(
            f"{where}: prefill workers keep {sent}, which can be sent as {sent} or float8_e4m3 (fp8) only",
            field="decode_kv_cache_dtype",
        )


def _ports(cluster: ClusterConfig) -> dict[str, int]:
    router, controller = cluster.router, cluster.controller
    return {
        "router.http_port": router.http_port,
        "router.grpc_port": router.grpc_port,
        "controller.admin_port": controller.admin_port,
        "controller.control_port": controller.control_port,
    }


def _build(kind: type[T], data: object) -> T:
    if not isinstance(data, dict):
        raise ConfigError(f"{kind.__name__} must be a JSON object")
    hints = typing.get_type_hints(kind)
    unknown = data.keys() - hints.keys()
    if unknown:
        raise ConfigError(f"{kind.__name__} has no setting {min(unknown)!r}", field=min(unknown))
    values: dict[str, object] = {}
    for name, value in data.items():
        hint = hints[name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            values[name] = _build(hint, value)
            continue
        if typing.get_origin(hint) is Mapping:
            values[name] = _text_map(f"{kind.__name__}.{name}", value)
            continue
        values[name] = _typed(value, hint)
        if values[name] is None:
            raise ConfigError(f"{kind.__name__}.{name} = {value!r}: must be {_KIND_NAMES[hint]}", field=name)
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{kind.__name__} is incomplete: {error}") from error


def _text_map(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ConfigError(f"{name} = {value!r}: must be a map of names to text", field=name)
    return value
