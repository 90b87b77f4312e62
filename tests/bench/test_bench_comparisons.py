"""What the comparing benches do around the measurement: start, check, stop a cluster, and show what came out."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from baton.slo import DEFAULT_CLASSES
from baton.timings import Timings
from bench import cluster
from bench.cluster import DISAGGREGATED, Cluster, ClusterError, running
from bench.compare import Row, add_parser, conditions, markdown
from bench.measure import Outcome, Record, summarise
from bench.report import Machine
from bench.shipping import Round, prefill_speed

FAKE_BATON = f"""#!{sys.executable}
import http.server, os, pathlib, signal, sys
here = pathlib.Path(__file__).parent
(here / "argv").write_text(" ".join(sys.argv[1:]))
(here / "sizes").write_text(" ".join(os.environ["BATON__" + n] for n in ("PREFILL", "DECODE", "BOTH")))
(here / "pid").write_text(str(os.getpid()))
MODE = (here / "mode").read_text()
if MODE == "dies":
    print("port 1 is taken")
    sys.exit(3)
if MODE == "stuck":
    signal.signal(signal.SIGINT, signal.SIG_IGN)

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/readyz" else 404)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass

port = int(sys.argv[sys.argv.index("--http-port") + 1])
try:
    http.server.HTTPServer(("127.0.0.1", port), Ready).serve_forever()
except KeyboardInterrupt:
    (here / "stopped").write_text("by SIGINT")
"""


@pytest.fixture
def fake_baton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    command = tmp_path / "baton"
    command.write_text(FAKE_BATON)
    command.chmod(0o700)
    monkeypatch.setattr(cluster, "BATON", command)
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    (tmp_path / "mode").write_text("good")
    return tmp_path


def is_alive(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_cluster_is_started_on_its_own_ports_waited_for_and_stopped(fake_baton: Path) -> None:
    async with running(DISAGGREGATED, ["--chunk-tokens", "64"]) as found:
        found.run_folder.mkdir(parents=True)
        argv = (fake_baton / "argv").read_text()
        assert argv.startswith("up --http-port ")
        assert (fake_baton / "sizes").read_text() == "1 1 0"
        assert argv.endswith(f"--admin-port {found.admin_port} --chunk-tokens 64")
        assert len({found.http_port, found.grpc_port, found.admin_port}) == 3
    assert (fake_baton / "stopped").read_text() == "by SIGINT"
    assert not is_alive(fake_baton / "pid")
    assert not found.run_folder.exists()


async def test_a_failing_bench_still_stops_its_cluster(fake_baton: Path) -> None:
    async def fail() -> Cluster:
        async with running(DISAGGREGATED):
            raise RuntimeError("the measurement")

    with pytest.raises(RuntimeError, match="the measurement"):
        await fail()
    assert not is_alive(fake_baton / "pid")


async def test_sigterm_stops_the_cluster_with_the_bench(fake_baton: Path) -> None:
    async def until_terminated() -> None:
        async with running(DISAGGREGATED):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    task = asyncio.create_task(until_terminated())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (fake_baton / "stopped").exists()


async def test_a_cluster_that_dies_is_an_error_with_its_last_lines(fake_baton: Path) -> None:
    (fake_baton / "mode").write_text("dies")
    with pytest.raises(ClusterError, match=r"status 3\nport 1 is taken"):
        async with running(DISAGGREGATED):
            pass


async def test_a_cluster_that_does_not_stop_is_killed(fake_baton: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake_baton / "mode").write_text("stuck")
    monkeypatch.setattr(cluster, "STOP_TIMEOUT_S", 0.2)
    async with running(DISAGGREGATED):
        assert is_alive(fake_baton / "pid")
    assert not is_alive(fake_baton / "pid")


def record(*, outcome: Outcome = Outcome.COMPLETED, kv_bytes: int = 0, prefill_ms: float = 250.0) -> Record:
    return Record(
        index=0,
        outcome=outcome,
        due_s=0.0,
        sent_s=0.0,
        end_s=2.0,
        token_times_s=(0.5, 1.0),
        prompt_tokens=1_100,
        cached_tokens=100,
        timings=Timings(prefill_ms=prefill_ms, kv_bytes=kv_bytes),
    )


def test_prefill_speed_is_uncached_tokens_over_the_servers_prefill_time() -> None:
    assert prefill_speed(record(), ships=False) == pytest.approx(4_000)
    assert prefill_speed(record(kv_bytes=1), ships=True) == pytest.approx(4_000)
    assert Round(shipped_tok_per_s=95.0, kept_tok_per_s=100.0).ratio == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("one", "ships"),
    [
        (record(kv_bytes=0), True),
        (record(kv_bytes=9), False),
        (record(prefill_ms=0.0), False),
        (record(outcome=Outcome.FAILED), False),
    ],
)
def test_a_call_that_is_no_evidence_is_refused(one: Record, ships: bool) -> None:
    with pytest.raises(ClusterError):
        prefill_speed(one, ships=ships)


def test_the_table_names_the_machine_and_shows_what_came_out() -> None:
    summary = summarise([record(), record(outcome=Outcome.FAILED)], started_s=0.0, slo=DEFAULT_CLASSES[0])
    machine = Machine(cpu="Some CPU", num_cores=2, memory_gib=8.0, system="Linux x86_64", python="3.11.7")
    lines = markdown([Row("P/D 1+1", 8, summary, 0.1)], machine).splitlines()
    assert lines[0] == "Some CPU, 2 cores, 8 GiB, Linux x86_64, Python 3.11.7"
    assert lines[-1] == "| P/D 1+1 | 8 | 1.0 | 500 / 500 | - / - | 500 / 500 | 2 | 0 | 1 |"
    assert lines[-1].count("|") == lines[-2].count("|") == lines[-3].count("|")


def test_the_conditions_name_the_load_and_what_a_p99_of_few_calls_is() -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    said = conditions(parser.parse_args(["compare", "--input-len", "64:512", "--", "--num-threads", "1"]))
    for words in (
        "gRPC",
        "prompts of 64:512 tokens",
        "32 output tokens",
        "`baton up --num-threads 1`",
        "p99 of fewer than 100",
    ):
        assert words in said
