"""mTLS between parts of a cluster: which files are usable, who reaches whom, and what those hear who do not."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.errors import ConfigError
from baton.peer_trust import PLAIN, Part, PeerTrust, why_failed
from tests.cluster_certificates import Authority, needs_openssl

pytestmark = needs_openssl
BROKEN_PEM = "-----BEGIN CERTIFICATE-----\nhello\n-----END CERTIFICATE-----\n"


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", list(Part))
def test_what_the_script_makes_can_be_used(authority: Authority, part: Part) -> None:
    PeerTrust(str(authority.of(part)), part)


def test_only_the_owner_may_read_what_the_script_makes(authority: Authority) -> None:
    assert not [file for file in authority.folder.rglob("*") if file.stat().st_mode & 0o077]


DAMAGES: dict[str, tuple[Callable[[Authority, Path], object], str]] = {
    "missing": (lambda _, folder: (folder / "tls.key").unlink(), "tls.key cannot be used: No such file"),
    "not PEM": (lambda _, folder: (folder / "tls.crt").write_bytes(b"\x30\x82"), "tls.crt cannot be used: it is not PEM"),
    "damaged certificate": (
        lambda _, folder: (folder / "tls.crt").write_text(BROKEN_PEM), "tls.crt cannot be used: it holds no certificate",
    ),
    "damaged authority": (
        lambda _, folder: (folder / "ca.crt").write_text(BROKEN_PEM), "ca.crt cannot be used: it holds no certificate",
    ),
    "damaged key": (
        lambda _, folder: (folder / "tls.key").write_text(BROKEN_PEM), "tls.key cannot be used: it is damaged",
    ),
    "encrypted key": (lambda ours, _: ours.encrypt_key(Part.WORKER), "tls.key cannot be used: it is damaged, or encrypted"),
    "another's key": (
        lambda ours, folder: shutil.copy(ours.of(Part.ROUTER) / "tls.key", folder), "tls.key cannot be used: it is not the key",
    ),
    "expired": (lambda ours, _: ours.sign_expired(Part.WORKER), "tls.crt cannot be used: certificate has expired"),
    "another part's": (
        lambda ours, folder: [shutil.copy(ours.of(Part.ROUTER) / name, folder) for name in ("tls.crt", "tls.key")],
        "not valid for 'worker.baton.internal'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_cannot_be_used_are_named_with_the_reason(authority: Authority, damage: str) -> None:
    spoil, message = DAMAGES[damage]
    folder = authority.of(Part.WORKER)
    spoil(authority, folder)
    with pytest.raises(ConfigError) as refused:
        PeerTrust(str(folder), Part.WORKER)
    assert message in refused.value.message
    assert str(folder) in refused.value.message
    assert refused.value.field == "tls_dir"
    assert "PRIVATE" not in refused.value.message


def test_a_certificate_of_another_authority_is_refused_at_start(authority: Authority, stranger: Authority) -> None:
    shutil.copy(stranger.folder / "ca.crt", authority.of(Part.WORKER))
    with pytest.raises(ConfigError, match="unable to get local issuer certificate"):
        authority.trust(Part.WORKER)


# -- connections -------------------------------------------------------------------------------------------------------


class Port:
    """One method that workers may call, on a server that is a worker's."""

    def __init__(self, trust: PeerTrust) -> None:
        self._trust = trust
        self.num_served = 0
        self._server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Call": method}),))
        self.address = f"127.0.0.1:{trust.listen(self._server, '127.0.0.1', 0)}"

    async def _serve(self, _: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await self._trust.admit(context, Part.WORKER)
        self.num_served += 1
        return b"served"

    async def called_by(self, trust: PeerTrust, part: Part = Part.WORKER) -> str:
        """ "served", or why not."""
        async with trust.channel(self.address, part, (("grpc.use_local_subchannel_pool", 1),)) as channel:
            try:
                return bytes(await channel.unary_unary("/test/Call", None, None)(b"")).decode()
            except grpc.aio.AioRpcError as error:
                return why_failed(error)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Port]:
        await self._server.start()
        try:
            yield self
        finally:
            await self._server.stop(None)


async def test_parts_of_one_cluster_reach_each_other_and_nobody_else_gets_through(
    authority: Authority, stranger: Authority
) -> None:
    worker = authority.trust(Part.WORKER)
    async with Port(worker).open() as port:
        assert await port.called_by(worker) == "served"
        assert await port.called_by(worker, Part.CONTROLLER) == (
            "no connection: its certificate names another part than the one that should answer there"
        )
        assert "may not call this" in await port.called_by(authority.trust(Part.ROUTER))
        assert "not of this cluster's authority" in await port.called_by(stranger.trust(Part.WORKER))
        assert "as a TLS port does" in await port.called_by(PLAIN)
        assert port.num_served == 1


async def test_a_client_that_trusts_us_but_shows_no_certificate_of_ours_is_refused(
    authority: Authority, stranger: Authority
) -> None:
    ours = (authority.folder / "ca.crt").read_bytes()
    folder = stranger.of(Part.WORKER)
    key, certificate = ((folder / name).read_bytes() for name in ("tls.key", "tls.crt"))
    name = (("grpc.ssl_target_name_override", Part.WORKER.host_name),)
    async with Port(authority.trust(Part.WORKER)).open() as port:
        for shown in ((ours,), (ours, key, certificate)):
            credentials = grpc.ssl_channel_credentials(*shown)
            async with grpc.aio.secure_channel(port.address, credentials, options=name) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary("/test/Call", None, None)(b"")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert port.num_served == 0


async def test_a_plain_text_port_refuses_tls_and_that_is_what_its_client_hears(authority: Authority) -> None:
    async with Port(PLAIN).open() as port:
        assert "it speaks plain text, this side TLS" in await port.called_by(authority.trust(Part.WORKER))
        assert await port.called_by(PLAIN) == "served"


async def test_renewed_files_are_used_by_the_next_connection_and_bad_ones_change_nothing(
    authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    folder, worker = authority.of(Part.WORKER), authority.trust(Part.WORKER)
    old = PeerTrust(str(shutil.copytree(folder, authority.folder / "old")), Part.WORKER)
    async with Port(worker).open() as port:
        authority.renew()
        assert await port.called_by(worker) == "served"
        assert await port.called_by(old) == "served", "the authority is the same"
        shutil.copytree(stranger.of(Part.WORKER), folder, dirs_exist_ok=True)
        assert await port.called_by(worker) == "served", "both ends have moved to another authority"
        assert await port.called_by(old) != "served"
        (folder / "tls.key").write_text("garbage")
        assert await port.called_by(worker) == "served"
        assert "certificates_refused" in caplog.text


def test_a_port_that_others_can_reach_without_tls_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Server:
        def add_insecure_port(self, address: str) -> int:
            return 1

    PLAIN.listen(Server(), "127.0.0.1", 0)  # type: ignore[arg-type]
    assert not caplog.records
    PLAIN.listen(Server(), "0.0.0.0", 0)  # type: ignore[arg-type]
    assert "port_without_tls" in caplog.text
