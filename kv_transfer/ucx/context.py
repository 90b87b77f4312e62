"""Options of the UCX context, and what is refused before a worker starts on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ucxx
from ucxx._lib import libucxx

from baton.config import KVTransferConfig
from baton.errors import ConfigError
from kv_transfer.events import TransportSettings
from kv_transfer.rdma import is_rdma, missing_for_rdma

_DEFAULT_OPTIONS = {  # kv.ucx may override them
    "KEEPALIVE_INTERVAL": "1s",  # a killed peer on shared memory is noticed in 0.64-0.80 s; UCX's own 20 s is too long
    # A peer's first read of a page costs 0.6 us in a sysv segment, 0.1-0.2 in a posix one (measured: docs/kv_transfer.md).
    # UCX goes on to sysv where /dev/shm is too small.
    "ALLOC_PRIO": "md:posix,md:sysv,thp,md:*,mmap,heap",
    "RNDV_THRESH": "inf",  # puts over TCP stay zero-copy: docs/kv_tcp.md
    "POSIX_ERROR_HANDLING": "y",
    "SYSV_ERROR_HANDLING": "y",
}
_FEATURES = (libucxx.Feature.TAG, libucxx.Feature.RMA, libucxx.Feature.WAKEUP)
MIN_SHM_BYTES = 32 << 20  # UCX's receive segments of one worker grow to some MiB; 32 leaves room for several workers
SHM_DIR = "/dev/shm"
_SHM_NAMES = ("all", "shm", "sm", "mm", "posix", "sysv")


def make_context(config: KVTransferConfig) -> Any:
    """The context that the configuration asks for.

    Raises:
        ConfigError: names the option of kv.ucx that UCX refuses, or else the transports and devices; no RDMA where it is
            required; too little shared memory.
    """
    if any(name in _SHM_NAMES for name in config.ucx_tls.split(",")):
        check_shared_memory(SHM_DIR)
    context = _make_context(config)
    if config.require_rdma:
        check_rdma(context.info, config)
    return context


def settings(context: Any, config: KVTransferConfig) -> TransportSettings:
    """What UCX runs with: the options that we or kv.ucx set, as UCX reports them where it does."""
    reported = context.config
    options = {name: reported.get(name) or value for name, value in _options(config).items()}
    return TransportSettings("ucx", _version(), options)


def check_shared_memory(path: str) -> None:
    """Refuse a shared-memory file system without room for UCX's segments; UCX itself fails late and obscurely.

    Raises:
        ConfigError: says how much there is and what to do.
    """
    try:
        stat = os.statvfs(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}; set kv.ucx_tls=tcp", field="kv.ucx_tls") from error
    free_bytes = stat.f_bavail * stat.f_frsize
    if free_bytes < MIN_SHM_BYTES:
        raise ConfigError(
            f"{path} has {free_bytes >> 20} MiB free; UCX's shared memory needs {MIN_SHM_BYTES >> 20}: enlarge it "
            "(docker run --shm-size, or an emptyDir with medium: Memory) or set kv.ucx_tls=tcp",
            field="kv.ucx_tls",
        )


def check_rdma(context_info: str, config: KVTransferConfig) -> None:
    """Refuse a UCX without an RDMA transport.

    Raises:
        ConfigError: lists the transports that there are and what is missing.
    """
    names = sorted({line.split()[-1] for line in context_info.splitlines() if "resource" in line and "/" in line})
    if not any(is_rdma(name) for name in names):
        missing = "; ".join(missing_for_rdma(config)) or "its RDMA devices are down or not usable by this process"
        raise ConfigError(
            f"kv.require_rdma is set, but UCX offers only {', '.join(names)}: {missing}", field="kv.require_rdma"
        )


def _make_context(config: KVTransferConfig) -> Any:
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # `import ucxx` sets variables that a CPU build of UCX lacks
    base = _options(replace(config, ucx={}))
    try:
        return _context(_options(config))
    except libucxx.UCXError as error:
        for name, value in config.ucx.items():
            if _is_refused(base | {name: value}) and not _is_refused(base):
                raise ConfigError(
                    f"kv.ucx.{name} = {value!r} is refused by UCX {_version()}: no such option, or no such value",
                    field=f"kv.ucx.{name}",
                ) from error
        raise ConfigError(
            f"UCX does not start with ucx_tls={config.ucx_tls!r} and ucx_net_devices={config.ucx_net_devices!r}: {error}",
            field="kv.ucx_tls",
        ) from error


def _options(config: KVTransferConfig) -> dict[str, str]:
    return {"TLS": config.ucx_tls, "NET_DEVICES": config.ucx_net_devices, **_DEFAULT_OPTIONS, **config.ucx}


def _context(options: Mapping[str, str]) -> Any:
    return libucxx.UCXContext(dict(options), feature_flags=_FEATURES)


def _is_refused(options: Mapping[str, str]) -> bool:
    try:
        _context(options)
    except libucxx.UCXError:
        return True
    return False


def _version() -> str:
    return ".".join(map(str, ucxx.get_ucx_version()))
