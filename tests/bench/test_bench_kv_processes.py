"""`baton bench kv` and its helpers with real processes, a few MiB each; figures are not judged."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench import kv_limits
from bench.child import Child, ChildError
from bench.kv import INTERRUPTED
from bench.kv_limits import Perftest, measure_perftest
from bench.kv_pair import KVPair
from bench.kv_plan import TRANSPORT_TLS, Case, block_tables
from bench.peers.runs import measure_peer

CASE = Case("demo", 128, 4, warm=True)  # 5.9 MB
NUM_BLOCKS = CASE.pool_blocks
OPENING_S = 60.0


@pytest.fixture(scope="module", params=[("shm", "staged"), ("shm", "direct"), ("tcp", "staged")], ids="-".join)
def kv_pair(request: pytest.FixtureRequest) -> Iterator[KVPair]:
    transport, mode = request.param
    with KVPair(CASE.layout, NUM_BLOCKS, TRANSPORT_TLS[transport], mode) as pair:
        connected = pair.connect()
        assert connected.mode == mode
        assert ("tcp" in connected.transport) == (transport == "tcp")
        yield pair


def test_every_transfer_is_timed_to_its_ack_and_its_bytes_are_compared(kv_pair: KVPair) -> None:
    sample = kv_pair.transfer(block_tables(CASE, NUM_BLOCKS, 1), block_tables(CASE, NUM_BLOCKS, 2))
    assert len(sample.commit_s) == CASE.transfers
    assert 0 < min(sample.commit_s) <= max(sample.commit_s) == sample.wall_s
    assert min(sample.sender_cpu_s, sample.receiver_cpu_s) > 0


def test_a_fresh_pair_takes_the_old_ones_place(kv_pair: KVPair) -> None:
    for seed in range(2):
        kv_pair.connect()
        kv_pair.transfer(block_tables(CASE, NUM_BLOCKS, seed), block_tables(CASE, NUM_BLOCKS, seed + 10))


def test_other_bytes_than_were_sent_are_noticed(kv_pair: KVPair) -> None:
    kv_pair.transfer(block_tables(CASE, NUM_BLOCKS, 5), block_tables(CASE, NUM_BLOCKS, 6))
    sent, received = kv_pair.accept(block_tables(CASE, NUM_BLOCKS, 5), block_tables(CASE, NUM_BLOCKS, 6))
    with pytest.raises(ChildError, match="not what was sent"):
        kv_pair.compare(sent, received)  # accepted and cleared, but nothing was shipped


def test_a_paced_prompt_arrives_whole_in_its_chunks(kv_pair: KVPair) -> None:
    case = Case("demo", 128, 1, warm=True)
    sent, received = kv_pair.accept(block_tables(case, NUM_BLOCKS, 7), block_tables(case, NUM_BLOCKS, 8))
    paced = kv_pair.ship_paced(sent[0], chunk_blocks=3, chunk_s=0.01)
    kv_pair.compare(sent, received)
    assert paced.num_chunks == 3  # 8 blocks
    assert 0 <= paced.num_late < paced.num_chunks
    assert paced.exposed_s > 0


def test_a_mode_that_the_transport_lacks_is_said_by_the_worker() -> None:
    with KVPair(CASE.layout, NUM_BLOCKS, "tcp", "direct") as pair, pytest.raises(ChildError, match="no pair"):
        pair.connect()


def test_ctrl_c_leaves_no_process() -> None:
    """With `overlap`, which starts the same workers at once: `kv` measures limits first."""
    bench = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "bench", "overlap", "--transport", "shm", "--mode", "staged"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert bench.stderr is not None
    assert any(line.startswith("shm staged") for line in bench.stderr)  # the workers start
    while len(children := psutil.Process(bench.pid).children()) < 2:
        time.sleep(0.01)
    bench.send_signal(signal.SIGINT)
    assert bench.wait(OPENING_S) == INTERRUPTED
    bench.stderr.close()
    gone, left = psutil.wait_procs(children, timeout=OPENING_S)
    assert len(gone) == len(children)
    assert not left


def test_a_child_that_cannot_start_or_dies_is_an_error_with_its_name() -> None:
    with pytest.raises(ChildError, match=r"nobody: /no/python cannot be started"):
        Child("nobody", "bench.kv_worker", python="/no/python")
    child = Child("stranger", "this.module.is.not")
    with pytest.raises(ChildError, match="stranger ended before it answered"):
        child.hear(object, OPENING_S)
    child.close()


def test_ucx_perftest_runs_over_tcp_with_and_without_error_handling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_limits, "MESSAGE_BYTES", 1 << 20)
    for error_handling in (True, False):
        limit = measure_perftest(Perftest("tcp", "ucp_put_bw", error_handling), rounds=1, iterations=2)
        assert limit.reason == ""
        assert limit.gb_per_s is not None
        assert limit.gb_per_s.min > 0


def test_a_library_that_is_not_installed_is_a_reason_in_each_row(tmp_path: Path) -> None:
    rows = list(measure_peer("mooncake", "tcp", [CASE], rounds=1, python=python_without(tmp_path, "mooncake")))
    assert [(row.paged, row.gb_per_s) for row in rows] == [(True, None), (False, None)]
    assert all("mooncake cannot be imported" in row.reason for row in rows)
    assert list(measure_peer("mooncake", "shm", [CASE], rounds=1, python=sys.executable)) == []


def python_without(folder: Path, module: str) -> str:
    """An interpreter like this one in which importing `module` fails."""
    script = folder / "python"
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n")
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)
