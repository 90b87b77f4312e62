"""Where a client's calls go and how it says who it is."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from baton.v1 import serving_pb2

# Half of what a router allows (docs/grpc.md), and far below the minute after which common load balancers drop silent connections.
KEEPALIVE_MS = 10_000
MAX_REPLY_BYTES = 16 << 20  # one message; routers send at most 4 MiB
OPTIONS: Sequence[tuple[str, int | str]] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    (
        "grpc.max_reconnect_backoff_ms",
        1_000,
    ),  # another router of the same name may be there long before gRPC's two minutes
    ("grpc.lb_policy_name", "round_robin"),  # of a name with several addresses: a retry goes to another router
    ("grpc.enable_retries", 0),  # we retry ourselves, by what the server says
)

Prompt = str | Sequence[int] | Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Connection:
    """`target` as gRPC takes it: host:port, dns:///name:port, or ipv4:A:PORT,B:PORT for several routers.

    TLS is used where `root_certificates` (PEM) or `tls` is given, mTLS with `private_key` and `certificate_chain` besides.
    """

    target: str
    api_key: str = ""
    tls: bool = False
    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        if not (self.tls or self.root_certificates is not None):
            return None
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate_chain)


def to_connection(target: str | Connection, api_key: str) -> Connection:
    return target if isinstance(target, Connection) else Connection(target, api_key)


def to_request(
    prompt: Prompt | serving_pb2.GenerateRequest, resumable: bool, sampling: dict[str, object]
) -> serving_pb2.GenerateRequest:
    """Text, token ids, or (role, content) pairs of a chat; a whole GenerateRequest is taken as it is, but for `resumable`."""
    if isinstance(prompt, serving_pb2.GenerateRequest):
        request = serving_pb2.GenerateRequest()
        request.CopyFrom(prompt)
    else:
        request = serving_pb2.GenerateRequest(sampling=serving_pb2.Sampling(**sampling))  # type: ignore[arg-type]
        _set_prompt(request, prompt)
    request.resumable = request.resumable or resumable
    if request.resumable and not request.request_id:
        request.request_id = secrets.token_hex(16)
    return request


def _set_prompt(request: serving_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.prompt = prompt
        return
    for item in prompt:
        if isinstance(item, int):
            request.token_ids.ids.append(item)
        else:
            role, content = item
            request.chat.messages.add(role=role, content=content)
