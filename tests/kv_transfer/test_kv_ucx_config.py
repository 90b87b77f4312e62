"""What UCX is refused for at start, in one line that says what to do; and addresses that are none."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.config import KVTransferConfig
from baton.errors import ConfigError
from kv_transfer.events import KVEvent, PairLost
from kv_transfer.plane import KVPlane
from kv_transfer.ucx import MIN_SHM_BYTES, check_rdma, check_shared_memory
from tests.kv_transfer.kv_fakes import ByteStore


def test_too_little_shared_memory_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=MIN_SHM_BYTES - 1))
    with pytest.raises(ConfigError, match=r"/dev/shm has 31 MiB free.*kv\.ucx_tls=tcp") as refused:
        KVPlane(ByteStore(), KVTransferConfig(ucx_tls="all"), 1, print)
    assert refused.value.field == "kv.ucx_tls"
    assert "\n" not in refused.value.message


def test_a_missing_shared_memory_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        check_shared_memory(str(tmp_path / "nowhere"))


def test_require_rdma_is_refused_where_ucx_has_none_and_names_what_it_has() -> None:
    with pytest.raises(ConfigError, match=r"offers only .*tcp/lo") as refused:
        KVPlane(ByteStore(), KVTransferConfig(require_rdma=True), 1, print)
    assert refused.value.field == "kv.require_rdma"


def test_require_rdma_is_content_with_a_verbs_transport() -> None:
    check_rdma("#      resource 0  :  md 0  dev 0  flags -- rc_mlx5/mlx5_0:1\n#      resource 1  :  md 1  -- tcp/lo\n")


def test_a_transport_that_ucx_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="ucx_tls='bogus'"):
        KVPlane(ByteStore(), KVTransferConfig(ucx_tls="bogus"), 1, print)


def test_a_foreign_address_loses_the_pair_and_harms_nothing_else() -> None:
    events: list[KVEvent] = []
    plane = KVPlane(ByteStore(), KVTransferConfig(ucx_tls="tcp"), 1, events.append)
    damaged = bytearray(plane.address)
    damaged[-1] ^= 1
    for address in (b"", b"garbage" * 10, bytes(damaged), plane.address[:-1], plane.address[:24]):
        plane.connect("b", 2, address, 7, 1 << 20, 2)
    plane.start()
    plane.stop()
    reason = "the peer's address is not a UCX address of this protocol"
    assert events == [PairLost("b", 7, reason)] * 5
