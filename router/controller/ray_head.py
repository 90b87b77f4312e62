"""How the local Ray head is started: command line and environment. Imports no ray; the command runs in its own process.

Each variable was checked against ray 2.60:
    RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH          without them whoever reaches the port runs code
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0         `get_node_ip_address` answers 127.0.0.1: loopback only
    RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0     SIGTERM ends the head at once instead of draining its node
    RAY_USAGE_STATS_ENABLED=0                   no reports home
    RAY_worker_niceness=0                       15 by default: any other process would take the engine's cores (measured: a killed
                                                worker answers again after 4.1-4.5 s instead of 6.0 s on 2 shared cores)
    RAY_START_HOOK                              names `without_client_server`, called before anything starts
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from baton.config import LOOPBACK

_OBJECT_STORE_BYTES = 80_000_000  # nothing of ours goes through it; Ray refuses less than 75 MiB
READY_LINE = "Ray runtime started."


class _RayParams(Protocol):
    ray_client_server_port: int | None


def without_client_server(ray_params: _RayParams, head: bool) -> None:
    """Start no Ray Client server: its fixed port 10001 would collide, and there is no flag for it."""
    ray_params.ray_client_server_port = None


def command(port: int, temp_dir: Path, num_cpus: int) -> list[str]:
    """`ray start` in the foreground: it ends its children when it ends (kernel death signal), and is ended by SIGTERM."""
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--node-ip-address", LOOPBACK, "--port", str(port), "--temp-dir", str(temp_dir)),
        *("--num-cpus", str(num_cpus), "--num-gpus", "0", "--object-store-memory", str(_OBJECT_STORE_BYTES)),
        *("--include-dashboard", "false", "--include-log-monitor", "false", "--no-monitor", "--disable-usage-stats"),
    ]


def environ(token_file: Path) -> Mapping[str, str]:
    """What the head and every process that talks to it need."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_START_HOOK": f"{__name__}.{without_client_server.__name__}",
    }
