"""Who holds a lease: a process that certainly ended is told from one that is only quiet, or not to be seen from here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import Unavailable
from router.controller import holder
from router.controller.database import SQLite
from router.controller.holder import describe, is_gone, this_process
from router.controller.lease import LEASE_S, MARGIN_S, Lease

TELLS_ITS_NAME = "from router.controller.holder import this_process; print(this_process(), flush=True); input()"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", TELLS_ITS_NAME], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        process.kill()


def name_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_process_is_gone_once_it_was_killed_and_waited_for_and_not_before(other: subprocess.Popen[str]) -> None:
    name = name_of(other)
    assert not is_gone(name)
    other.send_signal(signal.SIGSTOP)
    assert not is_gone(name), "it may go on"
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert not is_gone(name), "a zombie's threads may still run"
    other.wait()
    assert is_gone(name)


def test_this_process_is_not_gone_and_has_another_name_for_each_lease() -> None:
    first, second = this_process(), this_process()
    assert first != second
    assert not is_gone(first)
    assert describe(first).startswith(f"process {os.getpid()} on ")


def test_a_pid_that_was_given_again_is_not_the_process_that_had_it() -> None:
    host, pid, start, boot, namespace, nonce = this_process().split("/")
    assert is_gone("/".join((host, pid, str(int(start) - 1), boot, namespace, nonce)))


def test_what_is_not_to_be_seen_from_here_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    host, pid, _, boot, namespace, nonce = this_process().split("/")
    elsewhere = (
        "/".join((host, pid, "1", "another boot", namespace, nonce)),
        "/".join((host, pid, "1", boot, "pid:[1]+time:[1]", nonce)),
        "/".join((host, str(2**70), "1", boot, namespace, nonce)),
        "/".join((host, pid, "1", "", "", nonce)),
        "/".join((host, pid, "", boot, namespace, nonce)),  # it could not see its own start
        "first",
        "",
        "a/b/c/d/e/f",
    )
    for name in elsewhere:
        assert not is_gone(name)
    monkeypatch.setattr(holder, "_BOOT_ID", Path("/nowhere"))
    assert not is_gone("/".join((host, pid, "1", "", "", nonce))), "nobody can say where we are ourselves"
    assert not is_gone(this_process())


def test_a_process_that_proc_hides_is_there_as_long_as_signals_find_it(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[str]
) -> None:
    name = name_of(other)
    monkeypatch.setattr(holder, "_started", lambda pid: "")  # as with hidepid=2, of another user's
    assert not is_gone(name)
    other.kill()
    other.wait()
    assert is_gone(name)


def test_the_lease_of_a_killed_process_of_this_host_is_taken_over_at_once(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    database = SQLite(tmp_path / "leases.sqlite")
    first = Lease(database, "autoscaler", name_of(other))
    second = Lease(database, "autoscaler", this_process())
    assert first.take()
    assert not second.take()
    with pytest.raises(Unavailable, match=f"process {other.pid} on .* does, unless it died") as refused:
        second.check()
    assert LEASE_S - 1 < refused.value.retry_after_s <= LEASE_S + MARGIN_S
    other.kill()
    other.wait()
    assert second.take()
    second.check()
