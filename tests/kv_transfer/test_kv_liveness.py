"""A process is itself only while it runs: not after its death, not as a zombie, not with a reused pid."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from kv_transfer.liveness import ProcessIdentity, own_identity


def test_this_process_runs_and_another_start_of_its_pid_does_not() -> None:
    identity = own_identity()
    assert identity.pid == os.getpid()
    assert identity.is_running()
    assert not replace(identity, start_ticks=identity.start_ticks + 1).is_running()


def test_a_dead_process_and_its_zombie_do_not_run() -> None:
    program = "from kv_transfer.liveness import own_identity as own; print(own().start_ticks, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        identity = ProcessIdentity(process.pid, int(process.stdout.readline()))
        assert identity.is_running()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie
        assert not identity.is_running()
    assert not identity.is_running()
