"""`helm test`: the gRPC port is healthy. `check_grpc.py HOST:PORT [CA FILE]`; without such a file the system's are trusted."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def main() -> int:
    address, authority = sys.argv[1], sys.argv[2:]
    if authority:
        file = Path(authority[0])
        credentials = grpc.ssl_channel_credentials(file.read_bytes() if file.exists() else None)
        channel = grpc.secure_channel(address, credentials)
    else:
        channel = grpc.insecure_channel(address)
    with channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
