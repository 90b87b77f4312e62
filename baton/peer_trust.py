"""mTLS between the processes of one cluster: who may open which port of whom, and the credentials for it.

A process has a folder with `ca.crt`, `tls.crt` and `tls.key` (PEM, the names of a Kubernetes TLS secret). The cluster has an
authority of its own: whoever it signed is a part, nobody else is. Addresses are whatever the system picked, so certificates
name roles instead: router.baton.internal, worker.baton.internal, controller.baton.internal, each as a DNS entry of
subjectAltName. A client checks that it reached the role it wants, in the handshake; a server checks the role of its client
(`admit`) before it reads a message of a stream. No folder = plain text, as on a laptop.

The files are looked at for every new connection, so they can be renewed in place (renewed.py). A connection lives on with what it
began with. Used by event loops; grpc asks for new certificates on threads of its own.
"""

from __future__ import annotations

import enum
import ipaddress
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.errors import ConfigError
from baton.log import get_log
from baton.renewed import Renewed

log = get_log("baton.peer_trust")

FIELD = "tls_dir"
_DNS_NAMES = "peer_dns"  # of grpc's auth context: the DNS entries of the peer's subjectAltName

Context = grpc.aio.ServicerContext[Any, Any]


class Part(enum.StrEnum):
    """What a process is in its cluster; also the name of its folder below `baton up --tls-dir`."""

    ROUTER = "router"
    WORKER = "worker"
    CONTROLLER = "controller"

    @property
    def host_name(self) -> str:
        """In its certificate."""
        return f"{self}.baton.internal"


@dataclass(frozen=True, slots=True)
class _Credentials:
    server: grpc.ServerCertificateConfiguration
    channel: grpc.ChannelCredentials


class PeerTrust:
    """What one process shows to others, and whom it believes."""

    def __init__(self, folder: str = "", part: Part = Part.ROUTER) -> None:
        """`folder`: "" = no TLS, and every caller is admitted.

        Raises:
            ConfigError: a file is missing, or cannot be used; the message names it.
        """
        files = _Files(Path(folder), part) if folder else None
        self._credentials = Renewed(files.all, files.load) if files else None

    def channel(self, address: str, part: Part, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """A channel to a process of that part."""
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        name = ("grpc.ssl_target_name_override", part.host_name)
        return grpc.aio.secure_channel(address, self._credentials.current().channel, options=(*options, name))

    def listen(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Bind a port of the cluster's inside. Raises: RuntimeError, grpc's: it is taken."""
        address = f"{host}:{port}"
        if (credentials := self._credentials) is not None:
            dynamic = grpc.dynamic_ssl_server_credentials(
                credentials.current().server, lambda: credentials.current().server, require_client_authentication=True
            )  # asked before each handshake
            return server.add_secure_port(address, dynamic)
        if not _is_loopback(host):
            log.warning("port_without_tls", host=host, hint="whoever reaches it is believed; set tls_dir")
        return server.add_insecure_port(address)

    async def admit(self, context: Context, *parts: Part) -> None:
        """End the call unless its client is one of these. That it belongs to the cluster, the handshake has shown."""
        if self._credentials is None:
            return
        names = {name.decode(errors="replace") for name in context.auth_context().get(_DNS_NAMES, ())}
        if names.isdisjoint(part.host_name for part in parts):
            log.warning("peer_not_admitted", peer=context.peer(), names=sorted(names))
            wanted = " or ".join(part.host_name for part in parts)
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"the certificate shown is not one of {wanted}: it may not call this"
            )


PLAIN = PeerTrust()


class _Files:
    """The three files of one process."""

    def __init__(self, folder: Path, part: Part) -> None:
        self._part = part
        self._authority, self._certificate, self._key = folder / "ca.crt", folder / "tls.crt", folder / "tls.key"
        self.all = (self._authority, self._certificate, self._key)

    def load(self) -> _Credentials:
        """Raises: ConfigError."""
        authority, certificate, key = (_read(path) for path in (self._authority, self._certificate, self._key))
        self._rehearse()
        return _Credentials(
            grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authority),
            grpc.ssl_channel_credentials(authority, key, certificate),
        )

    def _rehearse(self) -> None:
        """Let the certificate shake hands with itself, in memory: what would fail later fails here, with a reason.

        That covers its dates, its key, its name, its authority, and that both a server and a client may show it.
        """
        client, server = self._context(ssl.PROTOCOL_TLS_CLIENT), self._context(ssl.PROTOCOL_TLS_SERVER)
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            client.wrap_bio(to_client, to_server, server_hostname=self._part.host_name),
            server.wrap_bio(to_server, to_client, server_side=True),
        ]
        try:
            while ends:
                ends = [end for end in ends if not _shook_hands(end)]
        except ssl.SSLCertVerificationError as error:
            raise _unusable(
                self._certificate, f"{error.verify_message.rstrip('.')} (judged by {self._authority})"
            ) from None
        except ssl.SSLError as error:
            raise _unusable(self._certificate, error.reason) from None

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.verify_mode = ssl.CERT_REQUIRED
        _believe(context, self._authority)
        authorities = context.get_ca_certs()
        if authorities and all(ssl.cert_time_to_seconds(str(ca["notAfter"])) < time.time() for ca in authorities):
            raise _unusable(self._authority, "it has expired")
        try:
            context.load_cert_chain(self._certificate, self._key, password=lambda: b"")  # never asks at a terminal
        except ssl.SSLError as error:
            _believe(ssl.SSLContext(protocol), self._certificate)  # whether it is a certificate at all
            is_other = error.reason == "KEY_VALUES_MISMATCH"
            why = f"it is not the key of {self._certificate}" if is_other else "it is damaged, or encrypted"
            raise _unusable(self._key, why) from None
        return context


def _believe(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError):
        raise _unusable(path, "it holds no certificate that can be read") from None


def _read(path: Path) -> bytes:
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise _unusable(path, error.strerror) from None
    if b"-----BEGIN " not in pem:
        raise _unusable(path, "it is not PEM")
    return pem


def _unusable(path: Path, why: str | None) -> ConfigError:
    return ConfigError(f"{FIELD}: {path} cannot be used: {why}", field=FIELD)


def _shook_hands(end: ssl.SSLObject) -> bool:
    """False: it waits for the other one."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# What grpc says of a connection that did not come up, and what it means between parts of a cluster.
_MEANINGS = (
    ("WRONG_VERSION_NUMBER", "it speaks plain text, this side TLS; give both a tls_dir, or neither"),
    ("Hostname Verification", "its certificate names another part than the one that should answer there"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of this cluster's authority, or has expired"),
    ("Socket closed", "it closed the connection at once, as a TLS port does that is spoken to in plain text or shown"
     " no certificate of its authority"),
)  # fmt: skip


def why_failed(error: grpc.aio.AioRpcError) -> str:
    """Of a call to another part, in one line."""
    details = error.details() or error.code().name
    if error.code() is not grpc.StatusCode.UNAVAILABLE or "failed to connect" not in details:
        return details
    return next((f"no connection: {meaning}" for sign, meaning in _MEANINGS if sign in details), details)
