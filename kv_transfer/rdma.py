"""What counts as RDMA, and what is missing where it is required but not there. Looks at this machine; changes nothing.

A transport is named as UCX names it, "transport/device", several joined by "+": "rc_mlx5/mlx5_0:1", "tcp/lo",
"posix/memory+cma/memory".
"""

from __future__ import annotations

from pathlib import Path

from baton.config import KVTransferConfig

# UCX's names of verbs transports begin so: rc_verbs, rc_mlx5, dc_mlx5, ud_verbs, srd, ...; rc_x, ib and the like in UCX_TLS.
_PREFIXES = ("rc", "dc", "ud", "ib", "srd")
_ALL_TLS = ("all", "")  # values of UCX_TLS and UCX_NET_DEVICES that leave nothing out
_DEVICES = Path("/sys/class/infiniband")  # one entry per verbs device of this host, RoCE included
_MAPS = Path("/proc/self/maps")


def is_rdma(transport: str) -> bool:
    """Whether every lane of a live transport is RDMA: KV may take any of them."""
    return bool(transport) and all(_is_rdma_name(lane) for lane in transport.split("+"))


def missing_for_rdma(config: KVTransferConfig) -> list[str]:
    """Every reason why UCX has no RDMA here that can be seen from here, each with the way out; [] if none is."""
    missing = []
    if not _DEVICES.is_dir() or not any(_DEVICES.iterdir()):
        missing.append(f"this host has no InfiniBand or RoCE device ({_DEVICES} is empty)")
    if not _has_verbs():
        missing.append(
            "this UCX is built without verbs: use an image that carries one with them "
            "(RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true)"
        )
    if config.ucx_tls not in _ALL_TLS and not any(_is_rdma_name(name) for name in config.ucx_tls.split(",")):
        missing.append(f"kv.ucx_tls = {config.ucx_tls} leaves RDMA out: add rc, or set all")
    if config.ucx_net_devices == "lo":
        missing.append("kv.ucx_net_devices = lo leaves RDMA devices out: set all, or name them (mlx5_0:1)")
    return missing


def _is_rdma_name(name: str) -> bool:
    return name.strip().split("/")[0].split("_")[0] in _PREFIXES


def _has_verbs() -> bool:
    """Whether the UCX that is loaded has its InfiniBand module, which lies in ucx/ beside libuct."""
    libraries = {line.split()[-1] for line in _MAPS.read_text().splitlines() if "/libuct.so" in line}
    return any(any((Path(library).parent / "ucx").glob("libuct_ib*")) for library in libraries)
