"""Certificates of the public gRPC port, read again for new connections once their files have changed.

With `grpc_client_ca_file` clients must show a certificate of one of its authorities. A connection lives on with what it began
with. grpc asks for certificates on threads of its own.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from baton.config import RouterConfig
from baton.errors import ConfigError
from baton.renewed import Renewed


def server_credentials(config: RouterConfig) -> grpc.ServerCredentials | None:
    """None: no TLS. Raises: ConfigError, naming the setting."""
    if not config.grpc_certificate_file:
        if config.grpc_key_file or config.grpc_client_ca_file:
            raise ConfigError("TLS needs grpc_certificate_file", field="grpc_certificate_file")
        return None
    files = [config.grpc_certificate_file, config.grpc_key_file, config.grpc_client_ca_file]
    renewed = Renewed([Path(file) for file in files if file], lambda: _load(config))
    return grpc.dynamic_ssl_server_credentials(
        renewed.current(), renewed.current, require_client_authentication=bool(config.grpc_client_ca_file)
    )


def _load(config: RouterConfig) -> grpc.ServerCertificateConfiguration:
    """Raises: ConfigError."""
    key = _pem(config.grpc_key_file, "grpc_key_file")
    chain = _pem(config.grpc_certificate_file, "grpc_certificate_file")
    client_ca = _pem(config.grpc_client_ca_file, "grpc_client_ca_file") if config.grpc_client_ca_file else None
    _check_pair(config)
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=client_ca)


def _check_pair(config: RouterConfig) -> None:
    """grpc would find out at each handshake, and only its clients would hear of it. Raises: ConfigError."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.grpc_certificate_file, config.grpc_key_file, password=lambda: b"")  # asks nobody
    except (ssl.SSLError, OSError) as error:
        why = error.reason if isinstance(error, ssl.SSLError) and error.reason else error
        raise ConfigError(
            f"grpc_key_file {config.grpc_key_file!r} and grpc_certificate_file {config.grpc_certificate_file!r} cannot be"
            f" used together ({why})",
            field="grpc_key_file",
        ) from None


def _pem(path: str, field: str) -> bytes:
    try:
        pem = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{field} {path!r} cannot be read ({error.strerror})", field=field) from None
    if b"-----BEGIN " not in pem:
        raise ConfigError(f"{field} {path!r} is not PEM", field=field)
    return pem
