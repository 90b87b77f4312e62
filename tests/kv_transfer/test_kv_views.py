"""Fp8Export: what the wire gets is what baton.kv_fp8 makes of the pool, whatever the frame; nothing goes the other way."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from baton.kv_copy import crc32c
from baton.kv_fp8 import dequantise, quantise
from kv_transfer.kv_views import Fp8Export
from tests.kv_transfer.kv_fakes import LAYOUT, ByteStore

WIDE = ("float32", "bfloat16", "float16")


def wide_store(dtype: str) -> tuple[ByteStore, torch.Tensor]:
    """A store of random numbers, and they themselves: [L, 2, N, S, K, D]."""
    store = ByteStore(replace(LAYOUT, dtype=dtype), num_blocks=8)
    numbers = torch.frombuffer(store.data, dtype=getattr(torch, dtype)).view(3, 2, 8, 4, 2, 4)
    torch.manual_seed(3)
    numbers.copy_(torch.randn(numbers.shape))
    return store, numbers


def wire(store: Fp8Export, num_layers: int, num_blocks: int) -> memoryview:
    return memoryview(bytearray(b"\xff" * (num_layers * store.layout.layer_block_bytes * num_blocks)))


@pytest.mark.parametrize("dtype", WIDE)
def test_the_wire_gets_each_head_vector_in_8_bits_with_its_scale_in_wire_order(dtype: str) -> None:
    store, numbers = wide_store(dtype)
    export = Fp8Export(store)
    for block_ids, layer_start, num_layers in (((6, 0, 3), 0, 3), ((5,), 2, 1), ((1, 2, 3, 4), 1, 2)):
        out = wire(export, num_layers, len(block_ids))
        crc = export.gather(block_ids, layer_start, num_layers, out)
        picked = numbers[layer_start : layer_start + num_layers, :, list(block_ids)]
        assert bytes(out) == quantise(picked).numpy().tobytes()
        assert crc == crc32c(out)


@pytest.mark.parametrize("dtype", WIDE)
def test_a_receiver_of_8_bits_takes_the_bytes_as_they_are(dtype: str) -> None:
    store, numbers = wide_store(dtype)
    export = Fp8Export(store)
    target = ByteStore(export.layout, num_blocks=20)
    out = wire(export, 3, 2)
    assert export.gather((7, 2), 0, 3, out) == target.scatter((11, 19), 0, 3, out)
    served = dequantise(torch.frombuffer(target.data, dtype=torch.uint8).view(3, 2, 20, 4, 2, 8), torch.float32)
    torch.testing.assert_close(served[:, :, [11, 19]], numbers[:, :, [7, 2]].float(), atol=0.01, rtol=2**-4)


def test_an_export_reads_only_what_it_sends_and_takes_nothing() -> None:
    store, _ = wide_store("float32")
    export = Fp8Export(store)
    export.gather((1, 4), 0, 3, wire(export, 3, 2))
    assert set(store.reads) == {(1, 4)}
    assert export.memory is None, "a peer that read the pool in place would get other bytes"
    with pytest.raises(AssertionError, match="takes no"):
        export.scatter((1,), 0, 1, wire(export, 1, 1))
    with pytest.raises(AssertionError, match="never written"):
        export.clear((1,), 0, 1)
    with pytest.raises(AssertionError, match="does not fit"):
        export.gather((1,), 0, 3, wire(export, 3, 2))
    assert not store.writes
    assert not store.clears


def test_importing_the_views_loads_no_torch() -> None:
    code = "import sys, kv_transfer.kv_views; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
