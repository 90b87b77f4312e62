"""A cluster that runs already, as the other commands find it: by its admin port."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from baton.config import ControllerConfig
from baton.errors import BatonError, NotFound, Unavailable, error_from_code
from cli.run_folder import ClusterRecord, RunFolder

_ADMIN_S = 15.0  # a drain waits up to 5 s for the worker


def add_cluster_flag(parser: argparse.ArgumentParser) -> None:
    default = ControllerConfig().admin_port
    parser.add_argument("--admin-port", type=int, default=default, help=f"which cluster (default {default})")


def add_token_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="your own admin token, whose name the history shows"
    )


@dataclass(frozen=True, slots=True)
class RunningCluster:
    record: ClusterRecord
    folder: RunFolder
    token_file: Path | None = None

    @classmethod
    def find(cls, admin_port: int, token_file: Path | None = None) -> RunningCluster:
        """`token_file`: holds the caller's own admin token; None = those of the run folder.

        Raises:
            NotFound: none runs with this admin port.
        """
        folder = RunFolder(admin_port)
        return cls(folder.read_record(), folder, token_file)

    def get(self, path: str) -> dict[str, object]:
        return self._call("GET", path, "viewer")

    def post(self, path: str) -> dict[str, object]:
        return self._call("POST", path, "operator")

    def change(self, method: str, path: str, body: dict[str, object], version: int) -> dict[str, object]:
        """Change what was read at `version`. Raises: BatonError: as _call; another version is in force."""
        return self._call(method, path, "operator", body, {"if-match": f'"{version}"'})

    def ask(self, path: str, body: dict[str, object]) -> dict[str, object]:
        """POST a question, which changes nothing."""
        return self._call("POST", path, "viewer", body)

    def _call(
        self,
        method: str,
        path: str,
        role: str,
        body: dict[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, object]:
        """Raises: BatonError: the endpoint's own error, or Unavailable."""
        sent = {"authorization": f"Bearer {self._secret(role)}", **(headers or {})}
        url = f"http://{self.record.host}:{self.record.admin_port}{path}"
        try:
            answer = httpx.request(method, url, headers=sent, json=body, timeout=_ADMIN_S)
            told = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unavailable(f"the admin endpoint on port {self.record.admin_port} does not answer: {error}") from None
        if answer.is_success:
            return dict(told)
        raise _error(told)

    def _secret(self, role: str) -> str:
        """Of the caller's own token, else of the run folder's for this role. Raises: BatonError: it cannot be read."""
        if self.token_file is None:
            return self.folder.admin_secret(role)
        try:
            return self.token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            raise NotFound(f"cannot read a token in {self.token_file}", field="token_file") from None


def _error(body: dict[str, dict[str, str]]) -> BatonError:
    error = body["error"]
    return error_from_code(error["code"], error["message"], error["field"])
