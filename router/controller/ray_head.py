"""How Ray is started on this machine: two command lines and their environment. Imports no ray; each runs in its own process.

    head  the GCS, which knows the actors, on storage that outlives it; no room for actors
    node  the raylet whose children the actors are
They are apart so that the loss of the head costs no worker: a new head on the same port and storage knows the same actors,
and whoever had a connection waits for it (measured with ray 2.60: head killed for 10 s, same actor afterwards; the second
raylet costs 200 MiB and 2-3 s). Workers end with their node.

Each variable was checked against ray 2.60:
    RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH          without them whoever reaches the port runs code
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0         `get_node_ip_address` answers 127.0.0.1: loopback only
    RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0     SIGTERM ends the head at once instead of draining its node
    RAY_USAGE_STATS_ENABLED=0                   no reports home
    RAY_worker_niceness=0                       15 by default: any other process would take the engine's cores (measured: a killed
                                                worker answers again after 4.1-4.5 s instead of 6.0 s on 2 shared cores)
    RAY_gcs_storage=rocksdb, .._path            what the head knew is there for the next one
    RAY_gcs_rpc_server_reconnect_timeout_s=600  how long raylet, actors and the controller wait for a head; then they end
    RAY_START_HOOK                              names `adapt_start`, called before anything starts
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from baton.config import LOOPBACK

_OBJECT_STORE_BYTES = 80_000_000  # nothing of ours goes through it; Ray refuses less than 75 MiB
READY_LINE = "Ray runtime started."


class _RayParams(Protocol):
    ray_client_server_port: int | None


def adapt_start(ray_params: _RayParams, head: bool) -> None:
    """Start no Ray Client server: its fixed port 10001 would collide, and there is no flag for it. Let a node join on
    loopback, which `ray start` refuses in favour of the machine's outside address."""
    ray_params.ray_client_server_port = None
    if not head:
        importlib.import_module("ray._private.ray_constants").ENABLE_RAY_CLUSTER = True  # type: ignore[attr-defined]
        importlib.import_module("ray._private.services").resolve_ip_for_localhost = str  # type: ignore[attr-defined]


def head_command(port: int, temp_dir: Path) -> list[str]:
    """`ray start` in the foreground: it ends its children when it ends (kernel death signal), and is ended by SIGTERM."""
    return [
        *(*_START, "--head", "--port", str(port), "--temp-dir", str(temp_dir), "--num-cpus", "0"),
        *("--include-dashboard", "false", "--no-monitor"),
    ]


def node_command(head_address: str, temp_dir: Path, num_cpus: int) -> list[str]:
    """As the head's."""
    return [*_START, "--address", head_address, "--temp-dir", str(node_dir(temp_dir)), "--num-cpus", str(num_cpus)]


def node_dir(temp_dir: Path) -> Path:
    """The node's own folder, by which a driver chooses it: one that is connected to the head's raylet ends, or hangs, with it."""
    return temp_dir / "n"


_START = (
    *(
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--node-ip-address",
        LOOPBACK,
        "--num-gpus",
        "0",
    ),
    *("--object-store-memory", str(_OBJECT_STORE_BYTES), "--include-log-monitor", "false", "--disable-usage-stats"),
)


def before_restart(temp_dir: Path) -> None:
    """A head refuses to start where it finds its predecessor's address."""
    (temp_dir / "ray_current_cluster").unlink(missing_ok=True)


def environ(token_file: Path, temp_dir: Path) -> Mapping[str, str]:
    """What head, node and every process that talks to them need."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(temp_dir / "gcs"),
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        "RAY_START_HOOK": f"{__name__}.{adapt_start.__name__}",
    }
