"""Who calls over gRPC: keys of tenants on calls, streams and resumed calls, and certificates of both ends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import grpc
import grpc.aio
import pytest

from baton.config import RouterConfig
from baton.errors import ConfigError
from baton.model_files import ModelFiles
from baton.v1 import serving_pb2
from baton_client import AsyncClient, CallFailed, Connection, RetryPolicy
from router.front_end import FrontEnd
from tests.router.parking_worker import start_parking_pair
from tests.router.router_rig import Rig, request, running_rig

ONCE = RetryPolicy(max_attempts=1)
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


def key_file(folder: Path, *names: str) -> str:
    keys = [{"name": name, "sha256": hashlib.sha256(f"bk-{name}".encode()).hexdigest()} for name in names]
    (folder / "keys.json").write_text(json.dumps({"keys": keys}))
    return str(folder / "keys.json")


def of(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer bk-{name}"),)


async def test_a_call_is_resumed_by_its_own_tenant_only_whoever_else_uses_the_same_id(
    files: ModelFiles, tmp_path: Path
) -> None:
    workers = await start_parking_pair()
    async with running_rig(files, workers, api_keys_file=key_file(tmp_path, "a", "b")) as rig:
        made = request(max_tokens=6)
        made.request_id, made.resumable = "same", True
        assert (await rig.generate(made, metadata=of("a"))).token_ids == list(range(300, 306))
        assert await resumed(rig, "b") is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.stub.Abort(serving_pb2.AbortRequest(request_id="same"), metadata=of("b"))
        assert await resumed(rig, "a") is grpc.StatusCode.OK
        assert await resumed(rig, "nobody") is grpc.StatusCode.UNAUTHENTICATED


async def resumed(rig: Rig, tenant: str) -> grpc.StatusCode:
    call = rig.stub.Resume(serving_pb2.ResumeRequest(request_id="same"), metadata=of(tenant))
    with contextlib.suppress(grpc.aio.AioRpcError):  # its code is what is asked for
        _ = [response async for response in call]
    return await call.code()


async def test_a_bulk_stream_without_a_key_ends_before_its_first_call(files: ModelFiles, tmp_path: Path) -> None:
    async with running_rig(files, api_keys_file=key_file(tmp_path, "a")) as rig:
        start = serving_pb2.SessionCall(start=serving_pb2.StartCall(call=1, generate=request(max_tokens=2)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            _ = [reply async for reply in rig.stub.Session(iter([start]))]
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        (reply,) = [r async for r in rig.stub.Session(iter([start]), metadata=of("a")) if r.ends]
        assert reply.ends[0].done.usage.completion_tokens == 2


# -- certificates ------------------------------------------------------------------------------------------------------


class Certificates:
    """One authority, and what it has signed: for the router at 127.0.0.1, and for a client."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run("req", "-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem", *_KEY)
        for name in ("router", "client"):
            self._run(
                "req", "-x509", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-CA", "ca.pem",
                "-CAkey", "ca.key", "-keyout", f"{name}.key", "-out", f"{name}.pem", *_KEY,
            )  # fmt: skip

    def path(self, name: str) -> str:
        return str(self._folder / name)

    def pem(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@needs_openssl
@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_serves_clients_that_trust_the_router_and_mtls_those_that_it_knows(
    files: ModelFiles, tmp_path: Path, mutual: bool
) -> None:
    made = Certificates(tmp_path)
    settings = {
        "grpc_certificate_file": made.path("router.pem"),
        "grpc_key_file": made.path("router.key"),
        "grpc_client_ca_file": made.path("ca.pem") if mutual else "",
    }
    async with running_rig(files, **settings) as rig:  # type: ignore[arg-type]
        target, root = f"127.0.0.1:{rig.front_end.grpc_port}", made.pem("ca.pem")
        known = Connection(
            target, root_certificates=root, private_key=made.pem("client.key"), certificate_chain=made.pem("client.pem")
        )
        anonymous = Connection(target, root_certificates=root)
        assert await served(known)
        assert await served(anonymous) is not mutual
        assert not await served(Connection(target, tls=True)), "who does not know our authority does not trust us"
        assert not await served(Connection(target))


@needs_openssl
async def test_a_renewed_certificate_serves_new_connections_and_one_that_does_not_fit_its_key_changes_nothing(
    files: ModelFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = Certificates(tmp_path / "old"), Certificates(tmp_path / "new")
    certificate, key = old.path("router.pem"), old.path("router.key")
    old_root, new_root = old.pem("ca.pem"), new.pem("ca.pem")
    async with running_rig(files, grpc_certificate_file=certificate, grpc_key_file=key) as rig:
        target = f"127.0.0.1:{rig.front_end.grpc_port}"
        async with AsyncClient(Connection(target, root_certificates=old_root), retry=ONCE) as before:
            assert await before.generate("hello", max_tokens=3).text()
            shutil.copy(new.path("router.key"), key)
            assert await served(Connection(target, root_certificates=old_root)), "half renewed"
            assert "certificates_refused" in caplog.text
            shutil.copy(new.path("router.pem"), certificate)
            assert await served(Connection(target, root_certificates=new_root))
            assert not await served(Connection(target, root_certificates=old_root))
            assert await before.generate("hello", max_tokens=3).text(), "a connection lives on"


async def served(connection: Connection) -> bool:
    async with AsyncClient(connection, retry=ONCE) as client:
        try:
            return bool(await client.generate("hello", max_tokens=3).text())
        except CallFailed:
            return False


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"grpc_key_file": "x"}, "grpc_certificate_file"),
        ({"grpc_certificate_file": __file__, "grpc_key_file": __file__}, "grpc_key_file"),
        ({"grpc_certificate_file": __file__, "grpc_key_file": "/nowhere"}, "grpc_key_file"),
    ],
)
async def test_certificates_that_cannot_be_used_are_named(
    files: ModelFiles, settings: dict[str, str], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        FrontEnd(RouterConfig(http_port=0, grpc_port=0, **settings), files)  # type: ignore[arg-type]
    assert refused.value.field == field
