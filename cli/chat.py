"""`baton chat [prompt]`: one answer, or a conversation, streamed over gRPC; --stats adds the table of timings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
    error_from_code,
)
from baton.v1 import serving_pb2, serving_pb2_grpc
from cli.running import RunningCluster, add_cluster_flag
from cli.terminal import fail, table

if TYPE_CHECKING:
    from cli.parsers import Commands

_DEADLINE_S = 600.0  # RouterConfig.request_timeout_s


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("chat", help="talk to a running cluster")
    parser.add_argument("prompt", nargs="?", help="one question; without it, a conversation until Ctrl-D")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=None)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--stats", action="store_true", help="print timings under each answer")
    parser.add_argument(
        "--address", default="", help="host:port of a router's gRPC API, instead of a cluster on this machine"
    )
    add_cluster_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    address = args.address or _local_address(args.admin_port)
    sampling = serving_pb2.Sampling(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    messages = [serving_pb2.ChatMessage(role="system", content=args.system)] if args.system else []
    with grpc.insecure_channel(address) as channel:
        for prompt in _prompts(args.prompt):
            messages.append(serving_pb2.ChatMessage(role="user", content=prompt))
            try:
                answer = stream_chat(channel, messages, sampling, _write)
            except BatonError as error:
                fail(error.message)
                if args.prompt is not None:
                    return 1
                messages.pop()
                continue
            messages.append(serving_pb2.ChatMessage(role="assistant", content=answer.text))
            print()
            if args.stats:
                show_stats(answer.done)
    return 0


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    done: serving_pb2.Done


def stream_chat(
    channel: grpc.Channel,
    messages: list[serving_pb2.ChatMessage],
    sampling: serving_pb2.Sampling,
    write: Callable[[str], None],
) -> Answer:
    """Send one conversation and pass the answer's text to `write` as it comes.

    Raises:
        BatonError: as the router says it.
    """
    request = serving_pb2.GenerateRequest(chat=serving_pb2.Chat(messages=messages), sampling=sampling)
    pieces: list[str] = []
    try:
        for event in serving_pb2_grpc.ServingStub(channel).Generate(request, timeout=_DEADLINE_S):
            kind = event.WhichOneof("event")
            if kind == "chunk":
                pieces.append(event.chunk.text)
                write(event.chunk.text)
            elif kind == "done":
                return Answer("".join(pieces), event.done)
            elif kind == "error":
                raise error_from_code(event.error.code, event.error.message, event.error.field)
    except grpc.RpcError as error:
        raise _rpc_error(error) from None
    raise Internal("the stream ended without a last message")


def show_stats(done: serving_pb2.Done) -> None:
    """The table under an answer. GB/s is of the KV transfer alone, from the first frame posted to the acknowledgement."""
    usage, timings = done.usage, done.timings
    gbytes_s = timings.kv_bytes / timings.kv_transfer_ms / 1e6 if timings.kv_transfer_ms else 0.0
    shipped = f"{timings.kv_bytes:,} bytes in {timings.kv_transfer_ms:.1f} ms" if timings.kv_bytes else "nothing"
    rows = [
        ["TTFT", f"{timings.ttft_ms:.1f} ms  (queue {timings.queue_ms:.1f}, prefill {timings.prefill_ms:.1f})"],
        ["handoff gap", f"{timings.handoff_gap_ms:.1f} ms"],
        ["TPOT", f"{timings.tpot_ms:.1f} ms"],
        ["prompt tokens", f"{usage.prompt_tokens}  ({usage.cached_tokens} cached)"],
        ["output tokens", str(usage.completion_tokens)],
        ["KV shipped", shipped],
        ["UCX transport", timings.transport or "none: nothing was shipped"],
        ["KV rate", f"{gbytes_s:.2f} GB/s" if timings.kv_bytes else "-"],
        ["prefill on", timings.prefill_worker],
        ["decode on", timings.decode_worker],
    ]
    table("Timings of this answer", ["what", "measured"], rows)


def _local_address(admin_port: int) -> str:
    record = RunningCluster.find(admin_port).record
    return f"{record.host}:{record.grpc_port}"


def _prompts(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given
        return
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _rpc_error(error: grpc.RpcError) -> BatonError:
    assert isinstance(error, grpc.Call)
    kinds = {
        kind.grpc_code: kind.code for kind in (InvalidRequest, NotFound, Overloaded, DeadlineExceeded, Unavailable)
    }
    status = error.code().name
    return error_from_code(kinds.get(status, Internal.code), f"{error.details()} ({status})")
