"""A worker process with nothing but a KV plane, driven over its standard input.

    python kv_peer.py TLS MODE FRAME_BYTES SEED NUM_BLOCKS

Each input line is a JSON list [method of KVPlane, *arguments]; bytes travel as hex. Each event is printed as [name, *fields]. The
first line printed is ["address", hex]. `blocks [ids]` answers with the digest of those blocks, `load` with the plane's gauges,
`resources` with what the process holds, `stop` stops the plane and lists what is left of it.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import sys
import threading

from baton.config import KVTransferConfig
from baton.kv_layout import KVLayout
from kv_transfer.events import KVEvent
from kv_transfer.plane import KVPlane, make_transport
from tests.kv_transfer.kv_fakes import ByteStore

PEER_LAYOUT = KVLayout(num_layers=8, num_kv_heads=4, head_dim=32, dtype="float32")  # 16 KiB per layer and block


def say(*words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def say_event(event: KVEvent) -> None:
    say(type(event).__name__, *(getattr(event, field.name) for field in dataclasses.fields(event)))


def resources() -> tuple[int, list[str]]:
    return len(os.listdir("/proc/self/fd")), [thread.name for thread in threading.enumerate()]


def main() -> None:
    tls, mode, frame_bytes, seed, num_blocks = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    before = resources()
    config = KVTransferConfig(ucx_tls=tls, mode=mode, frame_bytes=frame_bytes)
    transport = make_transport(config, "")
    store = ByteStore(PEER_LAYOUT, num_blocks, seed or None, transport.allocate(num_blocks * PEER_LAYOUT.block_bytes))
    plane = KVPlane(store, config, os.getpid(), say_event, transport)
    plane.start()
    say("address", plane.address.hex())
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        match method:
            case "connect":
                arguments[2] = bytes.fromhex(arguments[2])
                plane.connect(*arguments)
            case "blocks":
                say("blocks", hashlib.sha256(store.blocks(arguments[0])).hexdigest())
            case "load":
                say("load", dataclasses.asdict(plane.load()))
            case "peers":
                say("peers", {peer: dataclasses.asdict(status) for peer, status in plane.peers().items()})
            case "stop":
                plane.stop()
                del plane, transport, store  # the pool's memory, and UCX's context, live as long as its views
                gc.collect()
                say("stopped", before, resources())
                return
            case _:
                getattr(plane, method)(*arguments)


if __name__ == "__main__":
    main()
