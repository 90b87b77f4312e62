"""The UCX transport between two real processes, over shared memory and over TCP."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kv_transfer.kv_peer import PEER_LAYOUT

HERE = Path(__file__).parent
PATIENCE_S = 60.0  # other work shares these cores
FRAME_BYTES = 1 << 20
NUM_SLOTS = 4


class Peer:
    """A kv_peer.py process. `pid` is its epoch."""

    def __init__(self, tls: str, seed: int, num_blocks: int, mode: str) -> None:
        arguments = [
            sys.executable,
            "-m",
            "tests.kv_transfer.kv_peer",
            tls,
            mode,
            str(FRAME_BYTES),
            str(seed),
            str(num_blocks),
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.pid = self.process.pid
        self._lines: queue.Queue[list[Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.address = self.expect("address")[0]

    def call(self, method: str, *arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self.process.stdin.flush()

    def expect(self, name: str, timeout_s: float = PATIENCE_S) -> list[Any]:
        """The arguments of the next line, which must be a `name`."""
        got, *arguments = self.next_line(timeout_s)
        assert got == name, (got, arguments)
        return arguments

    def next_line(self, timeout_s: float = PATIENCE_S) -> list[Any]:
        return self._lines.get(timeout=timeout_s)

    def ask(self, method: str, *arguments: object) -> Any:
        self.call(method, *arguments)
        return self.expect(method)[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("["):  # UCX writes its own warnings to standard output
                with contextlib.suppress(json.JSONDecodeError):
                    self._lines.put(json.loads(line))


class Peers:
    """Starts peers and ends them with the test."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []

    def start(self, tls: str, seed: int, num_blocks: int = 256, mode: str = "auto") -> Peer:
        self._peers.append(Peer(tls, seed, num_blocks, mode))
        return self._peers[-1]

    def end(self) -> None:
        for peer in self._peers:
            peer.end()


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.end()


def connect(a: Peer, b: Peer, nonce: int = 7) -> str:
    """Connect two peers; returns the transport they report."""
    a.call("connect", "b", b.pid, b.address, nonce, FRAME_BYTES, NUM_SLOTS)
    b.call("connect", "a", a.pid, a.address, nonce, FRAME_BYTES, NUM_SLOTS)
    peer, got_nonce, transport = a.expect("PairReady")
    assert (peer, got_nonce) == ("b", nonce)
    assert b.expect("PairReady") == ["a", nonce, transport]
    return str(transport)


def transfer(a: Peer, b: Peer, seq: int, blocks: list[int]) -> int:
    """Ship the same block numbers from a to b; returns the payload's length."""
    b.call("open_incoming", "a", seq, 1, blocks, 0, PATIENCE_S)
    b.ask("load")  # the ticket is open before the first frame, as a Grant has it
    a.call("open_outgoing", "b", seq, b.pid, 1, 0, len(blocks), PATIENCE_S)
    a.call("ship", seq, blocks, len(blocks) // 2, False)
    a.call("ship", seq, blocks, len(blocks), True)
    _, num_frames, nbytes = a.expect("Shipped")
    assert nbytes == len(blocks) * PEER_LAYOUT.block_bytes
    b.call("commit_incoming", seq, 1, num_frames, nbytes)
    while (answer := b.next_line())[0] == "Incomplete":  # a loaded machine looks like a silent peer
        assert b.ask("load")["frames_dropped"] == 0
        a.call("resend", seq, answer[3])
    assert answer == ["Committed", seq, 1, nbytes]
    a.call("close_outgoing", seq)
    assert a.expect("OutgoingClosed") == [seq, ""]
    assert b.ask("blocks", blocks) == a.ask("blocks", blocks)
    return int(nbytes)


def loopback_bytes() -> int:
    """Bytes received on lo since boot, by whomever: a lower bound only."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


@pytest.mark.parametrize(
    ("tls", "mode"),
    [("tcp", "auto"), ("all", "auto"), ("all", "staged"), ("posix", "auto"), ("posix", "staged"), ("sysv", "direct")],
)
def test_blocks_cross_processes_bit_exact_over_the_transport_that_is_reported(
    peers: Peers, tls: str, mode: str
) -> None:
    a, b = peers.start(tls, seed=3, mode=mode), peers.start(tls, seed=0, mode=mode)
    transport = connect(a, b)
    expected = "staged" if tls == "tcp" or mode == "staged" else "direct"
    assert a.ask("peers")["b"]["mode"] == b.ask("peers")["a"]["mode"] == expected
    before = loopback_bytes()
    nbytes = sum(transfer(a, b, seq, list(range(256))) for seq in (1, 2))
    on_wire = loopback_bytes() - before
    if tls == "tcp":
        assert transport == "tcp/lo"
        assert on_wire >= nbytes
    else:
        assert ("sysv/memory" if tls == "sysv" else "posix/memory") in transport
        assert "tcp" not in transport
    for peer in (a, b):
        load = peer.ask("load")
        assert (load["slots_in_use"], load["frames_dropped"], load["num_outgoing"], load["num_incoming"]) == (0,) * 4


@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_a_killed_receiver_frees_the_sender_and_a_new_process_takes_its_place(peers: Peers, tls: str) -> None:
    a, b = peers.start(tls, seed=3, num_blocks=2048), peers.start(tls, seed=0, num_blocks=2048)
    connect(a, b)
    blocks = list(range(2048))  # 256 MiB: long enough to be hit in the middle
    b.call("open_incoming", "a", 5, 1, blocks, 0, PATIENCE_S)
    a.call("open_outgoing", "b", 5, b.pid, 1, 0, len(blocks), PATIENCE_S)
    b.process.send_signal(signal.SIGSTOP)  # it takes some frames into its ring, then nothing
    a.call("ship", 5, blocks, len(blocks), True)
    assert wait_until(lambda: a.ask("load")["slots_in_use"] == NUM_SLOTS)
    b.kill()
    killed_s = time.monotonic()
    seq, reason = a.expect("OutgoingClosed")
    assert (seq, reason.startswith("peer lost: ")) == (5, True)
    assert a.expect("PairLost")[:2] == ["b", 7]
    print(f"peer's death noticed after {time.monotonic() - killed_s:.2f} s over {tls}")
    assert wait_until(lambda: a.ask("load")["quarantined_slots"] == 0)
    assert a.ask("load")["slots_in_use"] == 0
    c = peers.start(tls, seed=0, num_blocks=2048)
    connect(a, c, nonce=8)
    transfer(a, c, 6, list(range(100)))


@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_a_killed_sender_closes_the_ticket_and_a_new_process_takes_its_place(peers: Peers, tls: str) -> None:
    a, b = peers.start(tls, seed=3), peers.start(tls, seed=0)
    connect(a, b)
    b.call("open_incoming", "a", 5, 1, [1, 2], 0, PATIENCE_S)
    a.kill()
    seq, reason = b.expect("IncomingClosed")
    assert (seq, reason.startswith("peer lost: ")) == (5, True)
    assert b.expect("PairLost")[:2] == ["a", 7]
    c = peers.start(tls, seed=4)
    connect(c, b, nonce=8)
    transfer(c, b, 6, list(range(100)))


@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_stop_leaves_no_thread_file_or_segment_and_tells_the_peer(peers: Peers, tls: str) -> None:
    segments = set(os.listdir("/dev/shm"))
    a, b = peers.start(tls, seed=3), peers.start(tls, seed=0)
    connect(a, b)
    transfer(a, b, 1, list(range(50)))
    a.call("stop")
    assert a.expect("PairLost") == ["b", 7, "the worker stops"]
    before, after = a.expect("stopped")
    assert before == after
    assert b.expect("PairLost")[:2] == ["a", 7]
    b.call("stop")
    before, after = b.expect("stopped")
    assert before == after
    assert set(os.listdir("/dev/shm")) <= segments
    creators = [int(line.split()[4]) for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    assert not {a.pid, b.pid} & set(creators)


def wait_until(condition: Any, timeout_s: float = PATIENCE_S) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.02)
    return False
