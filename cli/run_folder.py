"""The run folder of a cluster: $BATON_HOME/run/<admin port>, mode 0700, so the admin port names a cluster on this machine.

lock            held by the `baton up` that owns the folder
cluster.json    where everything is: pids, ports, what ended and was started again; there while the cluster runs
routers.json    where each router's own metrics are, in the form that Prometheus reads (file_sd_config)
config.json     the resolved configuration; router-<n>.json a router's part of it
tokens.json     admin tokens, 0600; ray.token Ray's, 0600
logs/           one file per process, of the last run
fleet.json      who is in the fleet and what is wanted of each; rates.json what arrived of late: for the run's next controller
slo.sqlite      the SLO classes and their history: outlives runs
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from baton.config import LOOPBACK
from baton.errors import ConfigError, NotFound
from baton.model_store import store_dir

_KEEP = ("slo.sqlite", "slo.sqlite-wal", "slo.sqlite-shm", "logs", "lock")


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """Where a running cluster is, for `baton status`, `chat` and `drain`."""

    pid: int  # of `baton up`
    host: str
    http_port: int
    grpc_port: int
    admin_port: int
    pids: dict[str, int]  # child process -> pid
    process_ports: dict[str, int] = field(default_factory=dict)  # of each router that has one: its own HTTP port
    states: dict[str, str] = field(
        default_factory=dict
    )  # child process -> up | starting | waiting (to be started again)
    num_ends: dict[str, int] = field(default_factory=dict)  # child process -> how often it ended and was started again


class RunFolder:
    def __init__(self, admin_port: int) -> None:
        self.path = store_dir() / "run" / str(admin_port)
        self.config_file = self.path / "config.json"
        self.tokens_file = self.path / "tokens.json"
        self.ray_token_file = self.path / "ray.token"
        self.logs = self.path / "logs"
        self._record_file = self.path / "cluster.json"
        self._lock_fd: int | None = None

    def take(self) -> None:
        """Make the folder and own it until `release`.

        Raises:
            ConfigError: another `baton up` owns it, or it cannot be made.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot use {self.path}: {error.strerror}; set BATON_HOME to a folder of yours"
            ) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_fd)
            raise ConfigError(
                f"a cluster with admin port {self.path.name} is already running; stop it, or start another one with"
                " --admin-port, --http-port and --grpc-port",
                field="controller.admin_port",
            ) from None
        self._lock_fd = lock_fd
        self._remove_all_but(_KEEP)
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(mode=0o700)

    def release(self, *, remove: bool) -> None:
        """Give the folder up: drop what belongs to the run, or everything. Nothing where `take` failed: it is another's."""
        if self._lock_fd is None:
            return
        self._remove_all_but(() if remove else _KEEP)
        os.close(self._lock_fd)
        self._lock_fd = None
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)

    def write_secrets(self) -> None:
        """Draw fresh tokens."""
        tokens = {role: {"role": role, "secret": secrets.token_urlsafe(24)} for role in ("viewer", "operator")}
        write_private(self.tokens_file, json.dumps(tokens, indent=2))
        write_private(self.ray_token_file, secrets.token_hex(32))

    def router_file(self, name: str) -> Path:
        return self.path / f"{name}.json"

    def write_record(self, record: ClusterRecord) -> None:
        """Atomically: `baton status` may read at any time."""
        new = self._record_file.with_suffix(".new")
        write_private(new, json.dumps(asdict(record), indent=2))
        new.replace(self._record_file)

    def write_targets(self, ports: Iterable[int]) -> None:
        """Name the HTTP ports whose /metrics are each one process's own."""
        targets = [{"targets": [f"{LOOPBACK}:{port}" for port in ports], "labels": {"job": "baton-router"}}]
        write_private(self.path / "routers.json", json.dumps(targets, indent=2))

    def read_record(self) -> ClusterRecord:
        """Raises: NotFound: no cluster runs with this admin port."""
        try:
            record = ClusterRecord(**json.loads(self._record_file.read_text(encoding="utf-8")))
            os.kill(record.pid, 0)
        except (OSError, ValueError, TypeError):
            raise NotFound(
                f"no cluster with admin port {self.path.name} runs here; start one with 'baton up', or name another"
                " with --admin-port"
            ) from None
        return record

    def admin_secret(self, role: str) -> str:
        """The token for `role`. Raises: NotFound."""
        try:
            return str(json.loads(self.tokens_file.read_text(encoding="utf-8"))[role]["secret"])
        except (OSError, ValueError, KeyError) as error:
            raise NotFound(f"cannot read the {role} token in {self.tokens_file}") from error

    def _remove_all_but(self, kept: tuple[str, ...]) -> None:
        for entry in self.path.iterdir():
            if entry.name not in kept and entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name not in kept:
                entry.unlink(missing_ok=True)


def write_private(file: Path, text: str) -> None:
    """Write a file that only this user can read, from its first byte on."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as stream:
        stream.write(text)
