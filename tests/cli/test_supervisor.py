"""Processes that end and are started again, and ports that are held for them meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.guard import sessions_of
from cli.ports import HeldPorts, free_port
from cli.processes import Child, end_children, spawn
from cli.restarts import FIRST_DELAY_S, MAX_DELAY_S, MAX_ENDS, WINDOW_S, Restarts
from cli.signals import Signals
from cli.supervisor import ClusterFailed, Part, supervise


def test_a_process_is_started_again_ever_later_until_it_ends_too_often() -> None:
    restarts = Restarts()
    delays = [restarts.ended(float(second)) for second in range(MAX_ENDS)]
    assert delays == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, 8 * FIRST_DELAY_S, None]


def test_ends_that_are_far_apart_do_not_add_up() -> None:
    restarts = Restarts()
    for end in range(100):
        delay_s = restarts.ended(end * WINDOW_S / (MAX_ENDS - 1) * 1.01)
        assert delay_s is not None
        assert delay_s <= MAX_DELAY_S
    assert restarts.num_ends == 100


class Processes:
    """One part whose processes run a script; `buried` are those that ended."""

    def __init__(self, folder: Path, script: str) -> None:
        self.started: list[Child] = []
        self.buried: list[int] = []
        self.states: list[str] = []
        self._log = folder / "part.log"
        self._script = script
        self.part = Part("router-0", self._start, lambda child: "up" in child.said(), 60.0, "nothing goes on")

    def _start(self) -> Child:
        child = spawn("router-0", [sys.executable, "-c", self._script], {}, self._log)
        self.started.append(child)
        return child

    def supervise(self, signals: Signals) -> None:
        supervise([self.part], signals, lambda child: self.buried.append(child.pid), self.note)

    def note(self) -> None:
        """Of each change; the user stops when the second process is up."""
        self.states.append(self.part.state)
        if self.states == ["up", "waiting", "starting", "up"]:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as signals:
        yield signals


def test_a_killed_process_is_started_again_in_place(
    tmp_path: Path, signals: Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = Processes(tmp_path, "import time; print('up', flush=True); time.sleep(600)")
    first = processes.part.begin()
    killer = threading.Timer(0.5, first.popen.kill)
    killer.start()
    processes.supervise(signals)
    killer.join()
    [_, second] = processes.started
    assert processes.buried == [first.pid]
    assert second.is_running
    assert end_children([second], 10.0)
    assert second.said() == "up\n", "what its predecessor said is not its own"
    said = capsys.readouterr().err
    assert "router-0 was killed (SIGKILL): nothing goes on; it is started again" in said
    assert f"router-0 is back as pid {second.pid}" in said


def test_a_process_that_ends_again_and_again_ends_the_cluster_with_its_last_word(
    tmp_path: Path, signals: Signals
) -> None:
    processes = Processes(tmp_path, "import sys; sys.exit('router: port 80 cannot be bound')")
    processes.part.begin()
    with pytest.raises(
        ClusterFailed, match=rf"router-0 ended \(port 80 cannot be bound\), the {MAX_ENDS}th end within"
    ):
        processes.supervise(signals)
    assert len(processes.started) == MAX_ENDS


def test_a_held_port_refuses_callers_and_strangers_and_lets_those_listen_who_share_it() -> None:
    held, port = HeldPorts(), free_port()
    try:
        assert held.hold(port)
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with (
            socket.create_server(("127.0.0.1", port), reuse_port=True),
            socket.create_server(("127.0.0.1", port), reuse_port=True),
            socket.create_connection(("127.0.0.1", port)),
        ):
            pass
    finally:
        held.release()


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_on_which_somebody_listens_cannot_be_held_even_where_he_would_share_it(shared: bool) -> None:
    held = HeldPorts()
    with socket.create_server(("127.0.0.1", 0), reuse_port=shared) as other:
        assert not held.hold(other.getsockname()[1])
    held.release()


def test_the_guard_forgets_sessions_that_were_taken_back() -> None:
    assert sessions_of(["12", "34", "-12", "56", "12"]) == {12, 34, 56}
    assert sessions_of(["12", "-12"]) == set()
