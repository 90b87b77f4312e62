"""The loopback transport keeps nothing of pairs that are gone: clusters without UCX run on it for days."""

from __future__ import annotations

import gc
import weakref

from kv_transfer.events import PairLost
from kv_transfer.loopback import MAX_CLOSED_NONCES
from tests.kv_transfer.kv_fakes import TwoCores


def test_a_pool_is_exported_as_long_as_its_pair_is_open_and_kept_by_who_reads_it() -> None:
    cores = TwoCores(mode="auto")
    cores.connect()
    assert set(cores.network.exported.values()) == {cores.store_a, cores.store_b}
    pool = weakref.ref(cores.store_a.data)
    reader = cores.b._pairs["a"]
    cores.a.disconnect("b")
    cores.transport_a.close()
    del cores.a, cores.store_a
    gc.collect()
    assert pool() is not None
    cores.b.disconnect("a")
    del reader
    gc.collect()
    assert pool() is None
    assert not cores.network.exported


def test_pairs_that_come_and_go_leave_nothing_but_their_latest_nonces() -> None:
    cores = TwoCores()
    size, slots = cores.config.frame_bytes, cores.config.num_slots
    for nonce in range(MAX_CLOSED_NONCES + 100):
        cores.a.connect("b", cores.EPOCH_B, b"b", nonce, size, slots)  # b never opens its end
        cores.settle()
        cores.a.disconnect("b")
        cores.settle()
    assert not cores.transport_b._early
    for transport in (cores.transport_a, cores.transport_b):
        assert not transport._channels
        assert len(transport._closed_nonces) == MAX_CLOSED_NONCES


def test_a_pair_that_the_peer_has_closed_already_is_lost_at_once() -> None:
    cores = TwoCores()
    size, slots = cores.config.frame_bytes, cores.config.num_slots
    cores.a.connect("b", cores.EPOCH_B, b"b", 7, size, slots)
    cores.settle()
    cores.a.disconnect("b")
    cores.settle()
    cores.b.connect("a", cores.EPOCH_A, b"a", 7, size, slots)
    cores.settle()
    assert cores.events_b == [PairLost("a", 7, "the peer has closed the pair, or its nonce was used before")]
