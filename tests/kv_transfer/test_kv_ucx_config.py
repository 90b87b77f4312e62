"""What UCX is refused for at start, in one line that says what to do; and addresses that are none."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.config import KVTransferConfig
from baton.errors import ConfigError
from kv_transfer.events import KVEvent, PairLost
from kv_transfer.plane import KVPlane
from kv_transfer.rdma import is_rdma
from kv_transfer.ucx.context import MIN_SHM_BYTES, check_rdma, check_shared_memory
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


def test_require_rdma_is_refused_where_ucx_has_none_and_names_what_it_has_and_what_is_missing() -> None:
    config = KVTransferConfig(require_rdma=True, ucx_tls="tcp,self", ucx_net_devices="lo")
    with pytest.raises(ConfigError, match=r"offers only .*tcp/lo") as refused:
        KVPlane(ByteStore(), config, 1, print)
    assert refused.value.field == "kv.require_rdma"
    assert "\n" not in refused.value.message
    for missing in (
        "no InfiniBand or RoCE device",
        "UCX is built without verbs",
        "kv.ucx_tls = tcp,self leaves RDMA out",
        "kv.ucx_net_devices = lo leaves RDMA devices out",
    ):
        assert missing in refused.value.message


def test_require_rdma_is_content_with_a_verbs_transport() -> None:
    info = "#      resource 0  :  md 0  dev 0  flags -- rc_mlx5/mlx5_0:1\n#      resource 1  :  md 1  -- tcp/lo\n"
    check_rdma(info, KVTransferConfig(require_rdma=True))


def test_every_lane_of_a_pair_must_be_rdma_to_count_as_such() -> None:
    assert is_rdma("rc_mlx5/mlx5_0:1")
    assert is_rdma("rc_mlx5/mlx5_0:1+dc_mlx5/mlx5_1:1")
    for other in ("", "loopback", "tcp/lo", "posix/memory+cma/memory", "rc_mlx5/mlx5_0:1+tcp/eth0"):
        assert not is_rdma(other), other


def test_options_of_ucx_are_in_force_and_shown_as_ucx_reports_them() -> None:
    options = {"RNDV_THRESH": "65536", "KEEPALIVE_INTERVAL": "2s", "TCP_TX_SEG_SIZE": "64k"}
    plane = KVPlane(ByteStore(), KVTransferConfig(ucx_tls="tcp", ucx=options), 1, print)
    settings = plane.settings
    plane.start()
    plane.stop()
    assert settings.kind == "ucx"
    assert re.fullmatch(r"\d+\.\d+\.\d+", settings.version)
    assert settings.options["TLS"] == "tcp"
    assert settings.options["KEEPALIVE_INTERVAL"].startswith("2")
    assert settings.options["RNDV_THRESH"] == "intra:64K,inter:64K"  # UCX's own words for 65536
    assert settings.options["TCP_TX_SEG_SIZE"] == "64k"
    assert settings.options["POSIX_ERROR_HANDLING"] == "y"


@pytest.mark.parametrize("options", [{"BOGUS_NAME": "1"}, {"RNDV_THRESH": "banana"}])
def test_an_option_that_ucx_refuses_is_named_in_one_line(options: dict[str, str]) -> None:
    (name,) = options
    config = KVTransferConfig(ucx_tls="tcp", ucx={"MAX_EAGER_LANES": "1", **options})
    with pytest.raises(ConfigError, match=rf"kv\.ucx\.{name} = .* is refused by UCX \d") as refused:
        KVPlane(ByteStore(), config, 1, print)
    assert refused.value.field == f"kv.ucx.{name}"
    assert "\n" not in refused.value.message


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
