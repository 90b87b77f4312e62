"""The probes of a container, asked for real: over HTTP, TCP and gRPC, or by a command."""

from __future__ import annotations

import http.client
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.kube.fake_api_resources import Json


@dataclass(frozen=True, slots=True)
class Target:
    """Where a container answers."""

    ip: str
    ports: dict[str, int]  # by name
    run: Callable[[list[str], float], int]  # a command in the container, and for how long; its exit status

    def port(self, named: int | str) -> int:
        return named if isinstance(named, int) else self.ports[named]


def ask(probe: Json, target: Target) -> bool:
    """Whether the container says yes within the probe's timeout."""
    timeout_s = float(probe.get("timeoutSeconds", 1))
    try:
        match probe:
            case {"httpGet": get}:
                return http_get(target.ip, target.port(get["port"]), get.get("path", "/"), timeout_s) < 400
            case {"tcpSocket": tcp}:
                socket.create_connection((target.ip, target.port(tcp["port"])), timeout_s).close()
                return True
            case {"grpc": rpc}:
                return _serving(f"{target.ip}:{rpc['port']}", rpc.get("service", ""), timeout_s)
            case {"exec": {"command": command}}:
                return target.run(command, timeout_s) == 0
            case _:
                raise ValueError(f"no such probe: {probe}")
    except (OSError, http.client.HTTPException, grpc.RpcError, subprocess.TimeoutExpired):
        return False


def http_get(ip: str, port: int, path: str, timeout_s: float) -> int:
    connection = http.client.HTTPConnection(ip, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def _serving(address: str, service: str, timeout_s: float) -> bool:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass(slots=True)
class Probe:
    """One probe of a container that runs: asked when due, believed after its thresholds."""

    spec: Json
    pace: float
    due_s: float = 0.0
    passed: bool = False  # since `successThreshold` answers in a row
    failed: bool = False  # since `failureThreshold` answers in a row
    _row: int = 0  # answers alike; negative: failures

    @classmethod
    def of(cls, container: Json, kind: str, pace: float) -> Probe | None:
        if (spec := container.get(kind)) is None:
            return None
        return cls(spec, pace, time.monotonic() + spec.get("initialDelaySeconds", 0) * pace)

    def look(self, target: Target) -> None:
        """Ask, if it is time."""
        if time.monotonic() < self.due_s:
            return
        yes = ask(self.spec, target)
        self.due_s = time.monotonic() + self.spec.get("periodSeconds", 10) * self.pace
        self._row = max(1, self._row + 1) if yes else min(-1, self._row - 1)
        if self._row >= self.spec.get("successThreshold", 1):
            self.passed, self.failed = True, False
        if -self._row >= self.spec.get("failureThreshold", 3):
            self.passed, self.failed = False, True
