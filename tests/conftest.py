"""For the whole test session: nothing that tests start may outlive them; and the certificates of two clusters."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster_certificates import Authority

SETTLE_S = 10.0  # what was told to end may need a moment


@pytest.fixture(scope="session")
def made_certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """Made once: openssl takes a quarter of a second. For tests marked `needs_openssl`."""
    folder = tmp_path_factory.mktemp("certificates")
    return Authority.make(folder / "ours"), Authority.make(folder / "theirs")


@pytest.fixture
def authority(made_certificates: tuple[Authority, Authority], tmp_path: Path) -> Authority:
    """Of our cluster, to be spoilt at will."""
    return made_certificates[0].copy(tmp_path / "ours")


@pytest.fixture
def stranger(made_certificates: tuple[Authority, Authority], tmp_path: Path) -> Authority:
    """Of another cluster."""
    return made_certificates[1].copy(tmp_path / "theirs")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the run where a process or a thread is left; fixtures of all scopes have ended by now.

    A port that this process still listens on belongs to an in-process test server that gRPC has not freed yet: it is named,
    since it should not be there, but does not fail the run. Ports of clusters end with their processes, which must be gone.
    """
    deadline_s = time.monotonic() + SETTLE_S
    while (leftovers() or open_ports()) and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.2)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    left = leftovers()
    for line in [*left, *open_ports()]:
        reporter.write_line(f"\nleft behind by the tests: {line}", red=True)
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def open_ports() -> list[str]:
    connections = psutil.Process().net_connections(kind="inet")
    return [f"port {c.laddr.port}" for c in connections if c.status == psutil.CONN_LISTEN]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error as error:  # it has ended meanwhile, or nobody has waited for it
        return f"{type(error).__name__}"


def leftovers() -> list[str]:
    processes = [f"process {child.pid} {_command(child)[:100]}" for child in psutil.Process().children(recursive=True)]
    # asyncio's and gRPC's pools keep daemon workers by design; threads of ours are named
    ours = ("engine", "loop", "baton-kv")
    threads = [f"thread {thread.name}" for thread in threading.enumerate() if thread.name in ours]
    return processes + threads
