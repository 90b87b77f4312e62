"""The scripts that pods of the chart run: the one that fetches a model, and the three checks of `helm test`."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.errors import ConfigError
from baton.model_files import describe_model, load_model_files
from tests.chart.chart_rig import CHART, needs_helm, render
from tests.chart.chart_values import EVERYTHING, LEAST
from tests.tiny_models import make_tiny_model

FILES = CHART / "files"


@dataclass(frozen=True, slots=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Scripts:
    """Runs them in this process, each as a fresh module."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = patch, capture
        # What reads a model stands aside: the script is what is tried here.
        self.readers = {
            "load_model_files": lambda path: print("read", path),
            "describe_model": lambda path: print("described", path),
        }

    def run(self, script: str, *args: str, key: str = "") -> Done:
        spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), FILES / script)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._patch.setattr(sys, "argv", [script, *args])
        self._patch.setenv("BATON_API_KEY", key)
        for name, reader in self.readers.items():
            self._patch.setattr(module, name, reader, raising=False)
        self._capture.readouterr()
        try:
            status = int(module.main())
        except ConfigError as error:  # as the script's last lines do
            status = 1
            print(error, file=sys.stderr)
        said = self._capture.readouterr()
        return Done(status, said.out, said.err)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Scripts:
    return Scripts(monkeypatch, capsys)


class Pages(ThreadingHTTPServer):
    """Answers what it was given, by method and path."""

    def __init__(self, answers: dict[str, tuple[int, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = answers
        self.asked: list[tuple[str, str]] = []  # path and authorization

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Pages

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("authorization", "")))
        status, body = self.server.answers.get(self.path, (404, b""))
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def pages() -> Iterator[Pages]:
    with Pages({}) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_model_is_fetched_once_and_read_before_it_counts_as_there(
    pages: Pages, scripts: Scripts, tmp_path: Path
) -> None:
    weights = b"weights" * 1000
    pages.answers["/m.gguf"] = (200, weights)
    target = tmp_path / "models" / "m.gguf"
    args = ("fetch", str(target), f"--url={pages.url}/m.gguf", f"--sha256={hashlib.sha256(weights).hexdigest()}")
    first, second = scripts.run("fetch_model.py", *args), scripts.run("fetch_model.py", *args)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert target.read_bytes() == weights
    assert f"read {target}" in first.stdout
    assert "read" not in second.stdout
    assert len(pages.asked) == 1
    assert scripts.run("fetch_model.py", "wait", str(target)).returncode == 0


def test_another_file_than_was_named_is_refused_and_leaves_nothing_that_counts(
    pages: Pages, scripts: Scripts, tmp_path: Path
) -> None:
    pages.answers["/m.gguf"] = (200, b"other")
    target = tmp_path / "m.gguf"
    done = scripts.run("fetch_model.py", "fetch", str(target), f"--url={pages.url}/m.gguf", f"--sha256={'0' * 64}")
    assert done.returncode == 1
    assert "has the sha256" in done.stderr
    assert not target.exists()
    late = scripts.run("fetch_model.py", "wait", str(target), "--limit-s=0")
    assert late.returncode == 1
    assert "look at the Job" in late.stderr


class Hub:
    """Hands out a folder, by the patterns that it is asked for."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str]] = []
        patch.setattr("huggingface_hub.snapshot_download", self._download)

    def _download(self, repo: str, revision: str, local_dir: Path, allow_patterns: list[str]) -> None:
        self.asked.append((repo, revision))
        (local_dir / ".cache").mkdir(parents=True)
        for file in self.folder.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy2(file, local_dir)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    folder = make_tiny_model(tmp_path / "hub")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    return Hub(folder, monkeypatch)


FROM_HUB = ("--repo=acme/tiny", "--revision=v1")


def test_a_folder_of_the_hub_is_asked_for_without_pickles_and_keeps_a_note_of_its_weights(
    hub: Hub, scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "acme--tiny-v1"
    scripts.readers.clear()
    done = scripts.run("fetch_model.py", "fetch", str(target), *FROM_HUB)
    assert done.returncode == 0, done.stderr
    assert hub.asked == [("acme/tiny", "v1")]
    assert (target / "model.safetensors").exists()
    assert not [file for file in target.iterdir() if file.suffix == ".bin" or file.name == ".cache"]
    weights_hash = describe_model(str(target)).spec.weights_hash
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("a worker reads them again to hash them"))
    assert load_model_files(str(target)).spec.weights_hash == weights_hash != ""


def test_a_router_is_content_with_the_small_files_of_a_folder(hub: Hub, scripts: Scripts, tmp_path: Path) -> None:
    target = tmp_path / "small" / "acme--tiny-v1"
    scripts.readers.clear()
    done = scripts.run("fetch_model.py", "fetch", str(target), "--small", *FROM_HUB)
    assert done.returncode == 0, done.stderr
    assert not list(target.glob("*.safetensors*"))
    ours, whole = describe_model(str(target)), describe_model(str(hub.folder))
    assert ours.spec == replace(whole.spec, name=ours.spec.name)
    assert ours.chat_template == whole.chat_template != ""


def test_the_check_of_the_api_wants_tokens_and_takes_a_refusal_without_a_key(pages: Pages, scripts: Scripts) -> None:
    pages.answers["/v1/models"] = (200, b'{"data": [{"id": "tiny"}]}')
    pages.answers["/v1/completions"] = (200, b'{"usage": {"completion_tokens": 4}}')
    good = scripts.run("check_api.py", pages.url, key="bk-1")
    assert good.returncode == 0, good.stderr
    assert {authorization for _, authorization in pages.asked} == {"Bearer bk-1"}
    pages.answers["/v1/completions"] = (200, b'{"usage": {"completion_tokens": 0}}')
    assert scripts.run("check_api.py", pages.url).returncode == 1
    pages.answers["/v1/models"] = (401, b"")
    assert scripts.run("check_api.py", pages.url).returncode == 0
    assert scripts.run("check_api.py", pages.url, key="bk-wrong").returncode == 1


def test_the_check_of_the_admin_port_finds_an_open_door(pages: Pages, scripts: Scripts) -> None:
    pages.answers |= {"/leaderz": (200, b""), "/admin/v1/slo": (401, b"")}
    with Pages({}) as router:
        thread = threading.Thread(target=router.serve_forever, args=(0.01,))
        thread.start()
        assert scripts.run("check_admin.py", pages.url, router.url).returncode == 0
        pages.answers["/admin/v1/slo"] = (200, b"")
        open_door = scripts.run("check_admin.py", pages.url, router.url)
        router.shutdown()
        thread.join()
    assert open_door.returncode == 1
    assert "answered 200, not 401" in open_door.stderr


def test_the_check_of_grpc_wants_a_router_that_serves(scripts: Scripts) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        checks.set("", health_pb2.HealthCheckResponse.SERVING)
        assert scripts.run("check_grpc.py", f"127.0.0.1:{port}").returncode == 0
        checks.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert scripts.run("check_grpc.py", f"127.0.0.1:{port}").returncode == 1
    finally:
        server.stop(0).wait()


def test_the_check_of_grpc_trusts_who_the_system_trusts_where_no_authority_is_named(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots: list[bytes | None] = []
    monkeypatch.setattr(grpc, "ssl_channel_credentials", roots.append)
    monkeypatch.setattr(grpc, "secure_channel", lambda address, _: grpc.insecure_channel(address))
    (tmp_path / "ca.crt").write_bytes(b"a certificate")
    for file in ("ca.crt", "none.crt"):
        with pytest.raises(grpc.RpcError):  # nobody serves there
            scripts.run("check_grpc.py", "127.0.0.1:1", str(tmp_path / file))
    assert roots == [b"a certificate", None]


@needs_helm
def test_every_module_that_a_pod_runs_is_there() -> None:
    called = set()
    for _, pod in render(EVERYTHING).pods():
        for container in pod["spec"]["containers"]:
            script = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
            for words in (container.get("args", []), " ".join(script).split()):
                called |= {words[at + 1] for at, word in enumerate(words[:-1]) if word == "-m"}
    assert {"router.main", "router.controller.main"} < called
    assert not {module for module in called if importlib.util.find_spec(module) is None}


@needs_helm
def test_there_are_three_checks_and_each_is_a_hook() -> None:
    pods = render(LEAST).of_kind("Pod")
    assert {pod["metadata"]["name"] for pod in pods} == {f"demo-baton-test-{name}" for name in ("api", "grpc", "admin")}
    assert {pod["metadata"]["annotations"]["helm.sh/hook"] for pod in pods} == {"test"}
