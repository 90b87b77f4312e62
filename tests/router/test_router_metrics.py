"""What /metrics says of KV: each handoff's own sample, and each worker's last report."""

from __future__ import annotations

import re
from dataclasses import replace

from baton.errors import TransferFailed
from baton.model_files import ModelFiles
from baton.v1 import worker_pb2
from router.sequence import SequenceReport
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import StubWorker


async def scraped(rig: Rig) -> dict[str, float]:
    """Every sample, by its name with labels as Prometheus writes them."""
    text = (await rig.http.get("/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^(baton_\S+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)}


async def test_each_handoff_is_one_sample_of_its_own_bytes_duration_and_exposed_time(rig: Rig) -> None:
    rig.prefill.script.transfer_ms, rig.prefill.script.exposed_ms = 300.0, 40.0
    await rig.generate(request(max_tokens=3))
    rig.prefill.script.transfer_ms, rig.prefill.script.exposed_ms = 700.0, 3.0
    await rig.generate(request(max_tokens=3, n=2))
    await rig.idle()
    said = await scraped(rig)
    assert said['baton_kv_transfer_bytes_total{transport="loopback"}'] == 3 * 4096
    assert said['baton_kv_transfer_duration_seconds_count{transport="loopback"}'] == 3
    assert round(said['baton_kv_transfer_duration_seconds_sum{transport="loopback"}'], 6) == 1.7
    assert said['baton_kv_transfer_duration_seconds_bucket{le="0.5",transport="loopback"}'] == 1
    assert said['baton_kv_transfer_duration_seconds_bucket{le="1.0",transport="loopback"}'] == 3
    assert said['baton_kv_transfer_exposed_seconds_bucket{le="0.005",transport="loopback"}'] == 2
    assert round(said['baton_kv_transfer_exposed_seconds_sum{transport="loopback"}'], 6) == 0.046
    assert said['baton_handoff_gap_seconds_count{slo_class="interactive"}'] == 2  # of each call's first choice


def test_a_handoff_whose_tokens_came_together_is_a_gap_of_zero_and_not_none() -> None:
    """Two Sessions are two streams: under load decode's first token may be read before prefill's."""
    report = SequenceReport(first_token_s=5.0, second_token_s=5.0, prefill_worker="p0", decode_worker="d0")
    assert report.handoff_gap_s == 0.0
    assert replace(report, decode_worker="p0").handoff_gap_s is None
    assert replace(report, second_token_s=0.0).handoff_gap_s is None


async def test_a_handoff_that_failed_or_was_not_needed_is_no_sample(rig: Rig) -> None:
    rig.prefill.script.fail_handoff = TransferFailed("no Ack")
    answer = await rig.generate(request(max_tokens=3))
    assert answer.token_ids == [300, 301, 302]  # decode had adopted it all the same
    rig.prefill.script.fail_handoff = None
    await rig.generate(request(max_tokens=1))
    await rig.idle()
    said = await scraped(rig)
    assert not [name for name in said if name.startswith("baton_kv_transfer_duration_seconds_count")]
    assert not [name for name in said if name.startswith("baton_kv_transfer_bytes_total")]


async def test_the_kv_plane_of_each_worker_is_shown_as_it_last_said(files: ModelFiles) -> None:
    worker = await StubWorker("b0").start()
    worker.kv_load = worker_pb2.Load(
        num_tickets=3, num_leases=2, slots_in_use=4, num_slots=16, quarantined_slots=5, kv_bytes_sent=700,
        kv_bytes_received=900, kv_transfers_expired=6, kv_frames_dropped=8, kv_failures={"damaged": 1, "peer_lost": 2},
    )  # fmt: skip
    expected = {
        'baton_kv_transfers_in_flight{direction="in",worker="b0"}': 3,
        'baton_kv_transfers_in_flight{direction="out",worker="b0"}': 2,
        'baton_kv_ring_occupancy_ratio{worker="b0"}': 0.25,
        'baton_kv_quarantined_slots{worker="b0"}': 5,
        'baton_kv_wire_bytes_total{direction="out",worker="b0"}': 700,
        'baton_kv_wire_bytes_total{direction="in",worker="b0"}': 900,
        'baton_kv_transfer_expired_total{worker="b0"}': 6,
        'baton_kv_frames_dropped_total{worker="b0"}': 8,
        'baton_kv_transfer_failures_total{reason="damaged",worker="b0"}': 1,
        'baton_kv_transfer_failures_total{reason="peer_lost",worker="b0"}': 2,
    }
    async with running_rig(files, [worker]) as rig:
        said = await scraped(rig)
        assert {name: said.get(name) for name in expected} == expected
        await worker.kill()
        await until(lambda: rig.front_end.fleet.endpoints[0].session.view is None, "the router has noticed")
        said = await scraped(rig)
        assert not [name for name in said if "kv_" in name and "b0" in name]
