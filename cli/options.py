"""Command-line flags that set configuration: one row each, all ending in `baton.config_load.load`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.config import ClusterConfig
from baton.config_load import Loaded, load
from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    path: str  # in ClusterConfig
    kind: Callable[[str], object]
    help: str


FLAGS = (
    Flag("--prefill", "prefill", int, "prefill workers"),
    Flag("--decode", "decode", int, "decode workers"),
    Flag("--model", "model.path", str, "a known name, a Hugging Face directory or a .gguf file"),
    Flag("--dtype", "model.dtype", str, "compute dtype"),
    Flag("--quantization", "model.quantization", str, "auto = weights as in the files; int8 = 8 bits, at loading"),
    Flag("--max-model-len", "model.max_model_len", int, "tokens of prompt and answer; 0 = the model's own"),
    Flag("--http-port", "router.http_port", int, "OpenAI HTTP API"),
    Flag("--grpc-port", "router.grpc_port", int, "gRPC API"),
    Flag("--routers", "router.processes", int, "router processes that share the two ports"),
    Flag("--admin-port", "controller.admin_port", int, "admin endpoint; also names the cluster on this machine"),
    Flag("--block-size", "engine.block_size", int, "tokens per KV block"),
    Flag("--num-blocks", "engine.num_blocks", int, "KV blocks per worker; 0 = from --kv-memory-bytes"),
    Flag("--kv-memory-bytes", "engine.kv_memory_bytes", int, "KV memory per worker, bytes"),
    Flag("--kv-cache-dtype", "engine.kv_cache_dtype", str, "auto = the compute dtype; fp8 = 8 bits"),
    Flag("--decode-kv-cache-dtype", "decode_kv_cache_dtype", str, "of decode workers; auto = --kv-cache-dtype"),
    Flag("--max-num-seqs", "engine.max_num_seqs", int, "sequences that decode in one step"),
    Flag("--max-num-batched-tokens", "engine.max_num_batched_tokens", int, "token budget of one step"),
    Flag("--chunk-tokens", "engine.chunk_tokens", int, "largest prefill chunk, tokens"),
    Flag(
        "--tensor-parallel-size",
        "engine.tensor_parallel_size",
        int,
        "processes of one worker that share every layer",
    ),
    Flag("--num-threads", "engine.num_threads", int, "torch threads per worker; 0 = cores / workers"),
    Flag("--ucx-tls", "kv.ucx_tls", str, "UCX transports, such as tcp or posix,sysv,self"),
    Flag("--tls-dir", "tls_dir", str, "certificates for mTLS inside, see docs/security.md; none = plain text"),
    Flag("--emulate", "emulation.gpu", str, "a GPU to emulate on the CPU, such as h100; see docs/emulator.md"),
    Flag("--emulate-model", "emulation.model", str, "whose step times; --model only lends its tokenizer then"),
    Flag("--tp", "emulation.tp", int, "emulated GPUs of each worker"),
    Flag("--emulate-dtype", "emulation.weight_dtype", str, "of the emulated weights: bf16, fp8, int4, ..."),
    Flag("--emulate-kv-dtype", "emulation.kv_dtype", str, "of the emulated KV: bf16 or fp8"),
    Flag("--time-scale", "emulation.time_scale", float, "10 = the emulated cluster's clock runs ten times slower"),
    Flag("--kv-scale", "emulation.kv_scale", int, "bytes of emulated KV for each byte really moved"),
    Flag("--start-s", "emulation.start_s", float, "that an emulated worker loads its weights for"),
    Flag("--flip-s", "emulation.flip_s", float, "that an emulated worker needs to change its role"),
    Flag("--failure-mean-s", "emulation.failure_mean_s", float, "mean life of an emulated worker; 0 = none dies"),
    Flag("--failure-seed", "emulation.failure_seed", int, "of the emulated deaths"),
    Flag("--mode", "controller.mode", str, "of the autoscaler: auto, advisory, frozen; see --autoscale"),
    Flag("--max-gpus", "controller.max_gpus", int, "that all pools together may take; 0 = as the database has it"),
    Flag("--standby", "controller.standby", int, "workers that are up and wait until they are needed"),
    Flag("--otlp-traces-endpoint", "tracing.endpoint", str, "http://host:4317 of a collector of traces"),
    Flag("--trace-sample-ratio", "tracing.sample_ratio", float, "of calls that come without a trace"),
    Flag("--drain-s", "router.drain_s", float, "longest wait for running calls at the end"),
)


_METAVARS: dict[Callable[[str], object], str] = {int: "N", float: "SECONDS", str: "NAME"}


def add_config_flags(parser: argparse.ArgumentParser, *, free_ports: bool = False) -> None:
    """Add a flag per row. With `free_ports`, help says that ports which nobody names are picked by the system."""
    group = parser.add_argument_group("configuration", "file <- BATON__SECTION__NAME in the environment <- these flags")
    group.add_argument("--config", type=Path, metavar="FILE", help="YAML file")
    for flag in FLAGS:
        default = "a free port" if free_ports and flag.name.endswith("-port") else _default(flag)
        shown = f"{flag.help} (default {default})"
        group.add_argument(flag.name, type=flag.kind, metavar=_METAVARS[flag.kind], default=None, help=shown)
    group.add_argument(
        "--colocated", action="store_true", help="one worker that does both; no prefill and decode pools"
    )
    group.add_argument(
        "--autoscale",
        action="store_true",
        help="--mode auto: workers are flipped, started and ended as traffic asks, within --max-gpus and this machine;"
        " without it the autoscaler only says what it would do",
    )
    group.add_argument(
        "--ucx",
        type=_ucx_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of UCX without its prefix, such as RNDV_THRESH=64k; may be repeated",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="the same numbers whatever shares a step, so that a continued answer equals the undisturbed one",
    )
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt whole")


def _ucx_option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _default(flag: Flag) -> object:
    value: object = ClusterConfig()
    for name in flag.path.split("."):
        value = getattr(value, name)
    return value


def load_config(args: argparse.Namespace) -> Loaded:
    """Merge file, environment and flags. Raises: ConfigError."""
    flags: dict[str, tuple[str, object]] = {}
    for flag in FLAGS:
        value = getattr(args, flag.name.strip("-").replace("-", "_"))
        if value is not None:
            flags[flag.path] = (flag.name, value)
    if args.colocated and (pools := flags.keys() & {"prefill", "decode"}):
        raise ConfigError(
            f"--colocated has no pools of its own: leave out --{min(pools)}, or --colocated", field=min(pools)
        )
    if args.colocated:
        flags |= {path: ("--colocated", size) for path, size in (("prefill", 0), ("decode", 0), ("both", 1))}
    if args.autoscale:
        if (asked := args.mode) not in (None, "auto"):
            raise ConfigError(
                f"--autoscale is --mode auto: leave out one of it and --mode {asked}", field="controller.mode"
            )
        flags["controller.mode"] = ("--autoscale", "auto")
    for name, value in args.ucx:
        flags[f"kv.ucx.{name}"] = (f"--ucx {name}=", value)
    if args.deterministic:
        flags["engine.deterministic"] = ("--deterministic", True)
    if args.no_prefix_cache:
        flags["engine.prefix_cache"] = ("--no-prefix-cache", False)
    return load(args.config, os.environ, flags)
