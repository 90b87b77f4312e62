"""What the tests of kv_transfer share: a block store of plain bytes and two planes' cores driven in one thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton import kv_copy
from baton.config import KVTransferConfig
from baton.kv_copy import KVMemory
from baton.kv_layout import KVLayout
from kv_transfer.core import PlaneCore
from kv_transfer.events import KVEvent
from kv_transfer.frame import HEADER_BYTES
from kv_transfer.loopback import Faults, LoopbackNetwork

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", block_size=4)  # 256 B per layer and block


class ByteStore:
    """Blocks as an array [layer][component][block][bytes]; remembers which blocks were read, written and cleared."""

    def __init__(
        self,
        layout: KVLayout = LAYOUT,
        num_blocks: int = 32,
        seed: int | None = None,
        buffer: memoryview | None = None,
    ) -> None:
        """Random bytes if there is a seed, else zeros; in `buffer` if it is given."""
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (layout.num_layers, layout.num_components, num_blocks, layout.run_bytes)
        self.data = np.zeros(shape, dtype=np.uint8) if buffer is None else np.asarray(buffer).reshape(shape)
        if seed is not None:
            self.data[:] = np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8)
        self.memory = KVMemory.dense(self.data.ctypes.data, layout, num_blocks)
        self.writes: list[tuple[int, ...]] = []
        self.reads: list[tuple[int, ...]] = []
        self.clears: list[tuple[int, ...]] = []

    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> int:
        self.reads.append(tuple(block_ids))
        return kv_copy.gather(self.layout, self.memory, self.num_blocks, block_ids, layer_start, num_layers, out)

    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> int:
        self.writes.append(tuple(block_ids))
        return kv_copy.scatter(self.layout, self.memory, self.num_blocks, block_ids, layer_start, num_layers, data)

    def clear(self, block_ids: Sequence[int], layer_start: int, num_layers: int) -> None:
        self.clears.append(tuple(block_ids))
        kv_copy.clear(self.layout, self.memory, self.num_blocks, block_ids, layer_start, num_layers)

    def blocks(self, block_ids: Sequence[int]) -> bytes:
        return self.data[:, :, list(block_ids)].tobytes()


def frame_bytes_for(num_layer_blocks: int, layout: KVLayout = LAYOUT) -> int:
    """A slot that holds so many (block, layer) pieces."""
    return HEADER_BYTES + num_layer_blocks * layout.layer_block_bytes


class TwoCores:
    """Two planes on one network, driven by hand: `a` sends, `b` receives."""

    EPOCH_A, EPOCH_B = 0xA, 0xB

    def __init__(
        self,
        faults: Faults | None = None,
        num_slots: int = 3,
        frame_bytes: int = frame_bytes_for(6),
        num_blocks: int = 32,
        mode: str = "staged",
    ) -> None:
        self.now_s = 100.0
        self.network = LoopbackNetwork(faults)
        self.config = KVTransferConfig(transport="loopback", mode=mode, frame_bytes=frame_bytes, num_slots=num_slots)
        self.store_a = ByteStore(num_blocks=num_blocks, seed=1)
        self.store_b = ByteStore(num_blocks=num_blocks)
        self.events_a: list[KVEvent] = []
        self.events_b: list[KVEvent] = []
        self.transport_a = self.network.transport("a")
        self.transport_b = self.network.transport("b")
        self.a = PlaneCore(self.store_a, self.config, self.EPOCH_A, self.events_a.append, self.transport_a, self.now_s)
        self.b = PlaneCore(self.store_b, self.config, self.EPOCH_B, self.events_b.append, self.transport_b, self.now_s)

    def connect(self, nonce: int = 7) -> None:
        slots, size = self.config.num_slots, self.config.frame_bytes
        self.a.connect("b", self.EPOCH_B, b"b", nonce, size, slots)
        self.b.connect("a", self.EPOCH_A, b"a", nonce, size, slots)
        self.settle()

    def poll(self, step_s: float = 0.0) -> bool:
        self.now_s += step_s
        busy_a = self.a.poll(self.now_s)
        return self.b.poll(self.now_s) or busy_a

    def settle(self) -> None:
        """Poll until nothing moves at this instant."""
        while self.poll():
            pass

    def run_for(self, duration_s: float, step_s: float = 0.01) -> None:
        stop_s = self.now_s + duration_s
        while self.now_s < stop_s:
            self.poll(step_s)
            self.settle()

    def take_events(self) -> tuple[list[KVEvent], list[KVEvent]]:
        """Events of a and b since the last call."""
        taken = list(self.events_a), list(self.events_b)
        self.events_a.clear()
        self.events_b.clear()
        return taken
