"""What this machine can do at best, measured in the same run: memcpy on one core, and UCX's own `ucx_perftest` between processes.

`ucx_perftest` comes with libucx. Its put is one-sided and repeated into one warm buffer, without blocks, checks or answers, so
it is a ceiling. With error handling (-e) UCX must notice a dead peer, as Baton's endpoints do; over TCP that alone turns a put
into copies through 8 KiB buffers (docs/kv_tcp.md), so there the put without it is the limit that figures are held against.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.kv_plan import TRANSPORT_TLS, Spread, spread

MESSAGE_BYTES = 256 << 20
COPY_BYTES = 512 << 20
PERFTEST_TIMEOUT_S = 60.0  # a run takes 1-3 s on an idle machine
SERVER_STOP_S = 5.0
LISTEN_S = 10.0  # until a server accepts; 20 ms on an idle machine
_FINAL = re.compile(r"^Final:\s+(?P<numbers>.*)$", re.MULTILINE)
# MB/s of 2**20: iterations, 50th percentile, average, overall, average bandwidth, *overall bandwidth*
_OVERALL_BANDWIDTH = 5


class PerftestError(Exception):
    """ucx_perftest cannot be found, failed, or printed something else than it used to."""


@dataclass(frozen=True, slots=True)
class Perftest:
    """One row: a test of ucx_perftest over one transport."""

    transport: str  # shm | tcp
    test: str  # ucp_put_bw | tag_bw
    error_handling: bool

    @property
    def name(self) -> str:
        return f"perftest {self.test} {'with' if self.error_handling else 'without'} error handling"


@dataclass(frozen=True, slots=True)
class Limit:
    transport: str  # "" = memcpy
    name: str
    gb_per_s: Spread | None  # None where it does not run here
    reason: str = ""  # why not


def perftests(transport: str) -> list[Perftest]:
    return [Perftest(transport, test, handling) for test in ("ucp_put_bw", "tag_bw") for handling in (True, False)]


def limit_of(transport: str) -> Perftest:
    """What the transport's figures are held against."""
    return Perftest(transport, "ucp_put_bw", error_handling=transport == "shm")


def measure_memcpy(rounds: int) -> Limit:
    """One core, both buffers warm; bytes copied, not bytes on the bus."""
    source, target = np.ones(COPY_BYTES, dtype=np.uint8), np.empty(COPY_BYTES, dtype=np.uint8)
    np.copyto(target, source)
    rates = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        np.copyto(target, source)
        rates.append(COPY_BYTES / 1e9 / (time.perf_counter() - started_s))
    return Limit("", "memcpy, one core", spread(rates))


def measure_perftest(test: Perftest, rounds: int, iterations: int) -> Limit:
    try:
        return Limit(test.transport, test.name, spread([run_perftest(test, iterations) for _ in range(rounds)]))
    except PerftestError as error:
        return Limit(test.transport, test.name, None, str(error))


def run_perftest(test: Perftest, iterations: int) -> float:
    """GB/s of one server and one client of ucx_perftest.

    Raises:
        PerftestError: no result.
    """
    folder = libucx_folder()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(folder / "bin" / "ucx_perftest"), "-p", str(port)]
    options = ["-t", test.test, "-s", str(MESSAGE_BYTES), "-n", str(iterations), "-w", "2"]
    with running([*command], perftest_environment(folder, test.transport)) as server:
        await_listener(port, server)
        try:
            client = subprocess.run(
                [*command, "127.0.0.1", *options, *(["-e"] if test.error_handling else [])],
                env=perftest_environment(folder, test.transport), capture_output=True, text=True,
                timeout=PERFTEST_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise PerftestError(f"no result within {PERFTEST_TIMEOUT_S:g} s") from error
    return parse_perftest(client.stdout + client.stderr)


def parse_perftest(output: str) -> float:
    """GB/s (1e9) from what a client printed.

    Raises:
        PerftestError: with UCX's own error line where there is one.
    """
    final = _FINAL.search(output)
    numbers = final["numbers"].split() if final else []
    if len(numbers) > _OVERALL_BANDWIDTH:
        with contextlib.suppress(ValueError):
            return float(numbers[_OVERALL_BANDWIDTH]) * 2**20 / 1e9
    errors = [line.split("ERROR", 1)[1].strip() for line in output.splitlines() if "ERROR" in line]
    raise PerftestError(errors[0] if errors else "ucx_perftest printed no result")


def libucx_folder() -> Path:
    """Raises: PerftestError: libucx is not installed."""
    try:
        import libucx  # type: ignore[import-untyped]
    except ImportError as error:
        raise PerftestError("libucx is not installed") from error
    return Path(libucx.__file__).parent


def perftest_environment(folder: Path, transport: str) -> dict[str, str]:
    """As kv_transfer sets UCX up, and the libraries that the binary needs."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "UCX_TLS": TRANSPORT_TLS[transport],
        "UCX_NET_DEVICES": "lo",
        "UCX_POSIX_ERROR_HANDLING": "y",
        "UCX_SYSV_ERROR_HANDLING": "y",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends by itself, or is killed."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SERVER_STOP_S)
    finally:
        process.kill()
        process.wait()


def await_listener(port: int, server: subprocess.Popen[bytes]) -> None:
    """Wait without connecting: the server takes the first connection for its client.

    Raises:
        PerftestError: it ended, or does not listen.
    """
    ends_s = time.monotonic() + LISTEN_S
    wanted = f":{port:04X}"
    while time.monotonic() < ends_s and server.poll() is None:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if any(row[1].endswith(wanted) and row[3] == "0A" for row in rows):  # 0A: LISTEN
            return
        time.sleep(0.01)
    raise PerftestError("the server of ucx_perftest did not listen")
