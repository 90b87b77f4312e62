"""A cluster that runs already, as the other commands find it: by its admin port."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import httpx

from baton.config import ControllerConfig
from baton.errors import BatonError, Unavailable, error_from_code
from cli.run_folder import ClusterRecord, RunFolder

_ADMIN_S = 15.0  # a drain waits up to 5 s for the worker


def add_cluster_flag(parser: argparse.ArgumentParser) -> None:
    default = ControllerConfig().admin_port
    parser.add_argument("--admin-port", type=int, default=default, help=f"which cluster (default {default})")


@dataclass(frozen=True, slots=True)
class RunningCluster:
    record: ClusterRecord
    folder: RunFolder

    @classmethod
    def find(cls, admin_port: int) -> RunningCluster:
        """Raises: NotFound: none runs with this admin port."""
        folder = RunFolder(admin_port)
        return cls(folder.read_record(), folder)

    def get(self, path: str) -> dict[str, object]:
        return self._call("GET", path, "viewer")

    def post(self, path: str) -> dict[str, object]:
        return self._call("POST", path, "operator")

    def _call(self, method: str, path: str, role: str) -> dict[str, object]:
        """Raises: BatonError: the endpoint's own error, or Unavailable."""
        headers = {"authorization": f"Bearer {self.folder.admin_secret(role)}"}
        url = f"http://{self.record.host}:{self.record.admin_port}{path}"
        try:
            answer = httpx.request(method, url, headers=headers, timeout=_ADMIN_S)
            body = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unavailable(f"the admin endpoint on port {self.record.admin_port} does not answer: {error}") from None
        if answer.is_success:
            return dict(body)
        raise _error(body)


def _error(body: dict[str, dict[str, str]]) -> BatonError:
    error = body["error"]
    return error_from_code(error["code"], error["message"], error["field"])
