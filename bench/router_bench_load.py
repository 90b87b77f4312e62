"""The compiled load generator (bench/router_load.c) and the HTTP stub (bench/router_stub.c): built, run, and read.

Both are built by gcc on demand and kept beside the models, by the hash of their source. A load is a list of whole HTTP
requests that connections send in turn; what it saw comes back as numpy arrays of packed records.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baton.model_store import store_dir
from bench.child import STOP_TIMEOUT_S, ChildError

SOURCES = Path(__file__).parent
CFLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")
COMPILE_TIMEOUT_S = 120.0
PLACEHOLDER = "@" * 16  # in a request: the generator writes the request's number there, in hex
NO_NUMBER = 0xFFFFFFFF
LEAD_S = 0.5  # connections of a load are made before it starts; 1,500 take 0.1 s

# struct event and struct record of router_load.c, and what the stub fleet notes. Instants: CLOCK_MONOTONIC.
EVENT = np.dtype([("number", "<u4"), ("index", "<u4"), ("received_ns", "<i8"), ("sent_ns", "<i8")])
RECORD = np.dtype(
    [
        ("number", "<u4"), ("status", "<u2"), ("outcome", "<u2"), ("due_ns", "<i8"), ("sent_ns", "<i8"), ("first_ns", "<i8"),
        ("end_ns", "<i8"), ("num_events", "<u4"), ("usage_tokens", "<u4"),
    ]
)  # fmt: skip
OPEN, DONE, CUT, REFUSED, FAILED = range(5)  # enum outcome of router_load.c
Records = NDArray[np.void]


class LoadError(ChildError):
    """The generator could not be built or did not run; says why."""


def build(name: str) -> Path:
    """The program made from bench/NAME.c, built if this source was not built before.

    Raises:
        LoadError: no gcc, or it refuses the source.
    """
    source = SOURCES / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes() + " ".join(CFLAGS).encode()).hexdigest()[:16]
    program = store_dir() / "bench" / f"{name}-{digest}"
    if program.is_file():
        return program
    gcc = shutil.which("gcc")
    if gcc is None:
        raise LoadError(f"{source.name} needs a C compiler: install gcc (Debian: apt-get install gcc libc6-dev)")
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        built = Path(folder) / name
        made = subprocess.run(
            [gcc, *CFLAGS, "-o", built, source], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
        if made.returncode != 0:
            raise LoadError(f"gcc refuses {source.name}: {made.stderr.strip()}")
        os.replace(built, program)  # another bench may have been quicker: the same bytes
    return program


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are sent. Closed loop, a request per connection at a time, unless `rate` is given."""

    port: int
    connections: int
    seconds: float  # in which requests begin
    drain_s: float = 0.0  # what is still open so long after them is dropped
    rate: float = 0.0  # requests per second; 0 = as soon as the connection's last one has ended
    ramp_s: float = 0.0  # the connections' first requests are spread over so much
    max_requests: int = 0  # 0 = no limit
    first_number: int = 0
    start_ns: int = 0  # CLOCK_MONOTONIC; 0 = LEAD_S from now
    nap_s: float = 0.0  # before each look at the sockets: a server that writes to it then seldom has to wake it


@dataclass(frozen=True, slots=True)
class Seen:
    """What a load saw."""

    records: Records  # of RECORD, one per request
    events: Records  # of EVENT, one per token event, in the order in which they were read
    cpu_s: float  # of the generator
    num_late: int  # requests of an open loop that found no idle connection when they were due
    num_reconnects: int

    def count(self, outcome: int) -> int:
        return int(np.count_nonzero(self.records["outcome"] == outcome))

    @property
    def num_tokens(self) -> int:
        return len(self.events)

    def failures(self) -> str:
        """What went wrong, "" where nothing did."""
        bad = self.records[self.records["outcome"] > DONE]
        kinds = {CUT: "cut", REFUSED: "refused", FAILED: "failed"}
        counts: dict[str, int] = {}
        for record in bad:
            name = f"{kinds[int(record['outcome'])]} (status {record['status']})"
            counts[name] = counts.get(name, 0) + 1
        return ", ".join(f"{count} {name}" for name, count in counts.items())


class Generator:
    """One running load. `seen` waits for its end."""

    def __init__(self, load: Load, requests: Iterable[bytes]) -> None:
        """Raises: LoadError: it cannot be built."""
        program = build("router_load")
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "requests").write_bytes(b"".join(struct.pack("=I", len(text)) + text for text in requests))
        self._prefix = folder / "seen"
        self.start_ns = load.start_ns or time.monotonic_ns() + int(LEAD_S * 1e9)
        self.stop_ns = self.start_ns + int(load.seconds * 1e9)
        self._end_ns = self.stop_ns + int(load.drain_s * 1e9)
        words = (
            program, load.port, folder / "requests", self._prefix, load.connections, load.first_number, load.max_requests,
            load.rate, self.start_ns, int(load.ramp_s * 1e9), self.stop_ns, self._end_ns, int(load.nap_s * 1e9),
            "127.0.0.1",
        )  # fmt: skip
        self._process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def seen(self) -> Seen:
        """Raises: LoadError: it failed, or did not end when it should have."""
        left_s = (self._end_ns - time.monotonic_ns()) / 1e9
        try:
            out, err = self._process.communicate(timeout=max(0.0, left_s) + STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise LoadError("the load generator did not end in time") from None
        if self._process.returncode != 0:
            raise LoadError(f"the load generator failed: {err.strip() or self._process.returncode}")
        summary = json.loads(out)
        return Seen(
            records=np.fromfile(f"{self._prefix}.requests", RECORD),
            events=np.fromfile(f"{self._prefix}.events", EVENT),
            cpu_s=summary["cpu_s"],
            num_late=summary["num_late"],
            num_reconnects=summary["num_reconnects"],
        )

    def close(self) -> None:
        """Idempotent; kills what still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        self._folder.cleanup()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def run_load(load: Load, requests: Iterable[bytes]) -> Seen:
    """Raises: LoadError: as Generator."""
    with Generator(load, requests) as generator:
        return generator.seen()


class HttpStub:
    """router_stub.c as a process; `ports` are those of its decode and its prefill worker."""

    def __init__(self, period_s: float = 0.0, canned: bytes = b"") -> None:
        """`canned`: every POST is answered by just these bytes. Raises: LoadError: it cannot be built or does not start."""
        self._folder = tempfile.TemporaryDirectory()
        words = [str(build("router_stub")), str(int(period_s * 1e9))]
        if canned:
            answer = Path(self._folder.name) / "answer"
            answer.write_bytes(canned)
            words.append(str(answer))
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LoadError("the HTTP stub did not start")
        self.ports: tuple[int, int] = tuple(json.loads(line)["ports"])
        self.pid = self._process.pid

    def close(self) -> None:
        """Idempotent; its standard input ends, and with it the stub."""
        self._process.communicate()
        self._folder.cleanup()

    def __enter__(self) -> HttpStub:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
