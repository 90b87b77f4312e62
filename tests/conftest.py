"""For the whole test session: nothing that tests start may outlive them."""

from __future__ import annotations

import threading
import time

import psutil
import pytest

SETTLE_S = 10.0  # what was told to end may need a moment


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the run where a process, a listening port or a thread is left; fixtures of all scopes have ended by now."""
    left = leftovers()
    deadline_s = time.monotonic() + SETTLE_S
    while left and time.monotonic() < deadline_s:
        time.sleep(0.2)
        left = leftovers()
    if left:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.write_line("\nLeft behind by the tests:", red=True)
        for line in left:
            reporter.write_line(f"  {line}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def leftovers() -> list[str]:
    me = psutil.Process()
    processes = [f"process {child.pid} {' '.join(child.cmdline())[:100]}" for child in me.children(recursive=True)]
    ports = [
        f"port {connection.laddr.port}"
        for connection in me.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    # asyncio's and gRPC's pools keep daemon workers by design; threads of ours are named
    ours = ("engine", "loop", "baton-kv")
    threads = [f"thread {thread.name}" for thread in threading.enumerate() if thread.name in ours]
    return processes + ports + threads
