"""What a token's `send` costs over loopback, by congestion control: `python -m bench.loopback_send`. Linux.

A step's worth of sockets is written to one after the other, as the router does; CPU time of the thread, in which the kernel
also does the receiver's part. Nobody waits at the other end, so no wake-up is in it. Source of the kernel's share in
docs/router_cost.md.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

from bench.measure import percentiles

NUM_SOCKETS, NUM_ROUNDS = 400, 60
PAUSE_S = 0.02  # about a decode step
CHUNK = b"x" * 220  # a streamed completion's chunk of one token
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def costs_us(control: str) -> list[float]:
    """Of one send, the mean of each round."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        pairs: list[tuple[socket.socket, socket.socket]] = []
        for _ in range(NUM_SOCKETS):
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            server = stack.enter_context(listener.accept()[0])
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
            pairs.append((client, server))
        costs = []
        for _ in range(NUM_ROUNDS):
            began_s = time.thread_time()
            for _, server in pairs:
                server.send(CHUNK)
            costs.append(1e6 * (time.thread_time() - began_s) / NUM_SOCKETS)
            for client, _ in pairs:
                client.recv(len(CHUNK))
            time.sleep(PAUSE_S)
        return costs


def main() -> None:
    for control in AVAILABLE.read_text().split() * 2:  # twice, in turn: machines drift
        costs = percentiles(costs_us(control))
        print(
            f"{control:8} p50 {costs.p50:5.2f}, p95 {costs.p95:5.2f} us per send, n = {NUM_ROUNDS} x {NUM_SOCKETS}",
            flush=True,
        )


if __name__ == "__main__":
    main()
