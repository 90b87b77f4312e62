"""Real processes that are killed under a running `baton up`: each comes back in place, the others go on."""

from __future__ import annotations

import signal
from collections.abc import Callable

import httpx
import pytest

from tests.cli.up_rig import Up, until


@pytest.mark.timeout(300)
def test_all_processes_come_back_in_place_and_the_worker_notices_only_the_loss_of_its_node(
    up: Callable[..., Up],
) -> None:
    cluster = up("--routers", "2")
    cluster.until_ready()
    before, sessions = cluster.worker(), dict(cluster.sessions)
    ports = cluster.record()["process_ports"]
    for part in ("router-0", "controller", "ray", "controller"):
        cluster.kill(part)
        until(lambda: cluster.worker()["state"] == "ready")
        until(lambda: all(is_ready(port) for port in ports.values()))
    after = cluster.worker()
    assert [after[key] for key in ("pid", "epoch", "num_restarts")] == [
        before[key] for key in ("pid", "epoch", "num_restarts")
    ]
    assert cluster.sessions["router-1"] == sessions["router-1"]
    for part in ("router-0", "controller", "ray"):
        assert f"{part} was killed (SIGKILL)" in cluster.output
        assert f"{part} is back as pid {cluster.sessions[part]}" in cluster.output

    cluster.kill("ray-node")
    until(lambda: (cluster.worker()["state"], cluster.worker()["num_restarts"]) == ("ready", 1))
    until(lambda: all(is_ready(port) for port in ports.values()))
    assert cluster.end(signal.SIGINT) == 0, cluster.output
    assert "no process, port or shared-memory file is left" in cluster.output
    cluster.assert_nothing_left()


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
