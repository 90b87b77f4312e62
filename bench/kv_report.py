"""What `baton bench kv` shows: progress while it runs, then tables for people and JSON for scripts. Nothing is measured here.

rich is loaded only where something is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from bench.kv_limits import Limit
from bench.kv_plan import TRANSPORT_TLS, Case, Figures, Spread
from bench.peers.runs import PeerRow
from bench.report import this_machine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 160  # columns where nobody says how wide the reader is


class Progress:
    """One line on stderr: alive on a terminal, a new one for each step elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("starting") if self._console.is_terminal else None

    def say(self, what: str) -> None:
        if self._status:
            self._status.update(what)
        else:
            self._console.print(f"{what} ...", markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()


@dataclass(frozen=True, slots=True)
class Row:
    """One case over one transport in one mode."""

    transport: str
    mode: str
    case: Case
    figures: Figures
    limit: Limit  # what it is held against
    peers: tuple[PeerRow, ...]  # that moved the same bytes

    @property
    def limit_gb_per_s(self) -> float | None:
        return self.limit.gb_per_s.median if self.limit.gb_per_s else None


@dataclass(frozen=True, slots=True)
class Report:
    limits: Sequence[Limit]
    rows: Sequence[Row]
    peers: Sequence[PeerRow]
    foreign_cores: float  # that other processes kept busy meanwhile


def print_report(report: Report) -> None:
    console = report_console()
    console.print(f"{this_machine()}", markup=False, soft_wrap=True)
    console.print(limits_table(report.limits))
    console.print(rows_table(report.rows))
    if report.peers:
        console.print(peers_table(report.peers))
    for line in notes(report):
        console.print(line, markup=False, soft_wrap=True)


def limits_table(limits: Sequence[Limit]) -> Table:
    table = new_table("Limits of this machine, same run", "transport", "what", ">GB/s", ">min-max", ">n")
    for limit in limits:
        if limit.gb_per_s:
            table.add_row(limit.transport or "-", limit.name, *rate_cells(limit.gb_per_s))
    return table


def rows_table(rows: Sequence[Row]) -> Table:
    columns = ("transport", "mode", "case", ">GB/s", ">min-max", ">n", ">of limit", ">commit ms", ">min-max")
    table = new_table("Baton, ship to Ack, every byte verified", *columns, ">CPU s/GB: sender", ">receiver")
    for row in rows:
        figures, limit = row.figures, row.limit_gb_per_s
        commit = figures.commit_ms
        table.add_row(
            row.transport, row.mode, row.case.name, *rate_cells(figures.gb_per_s),
            f"{figures.gb_per_s.median / limit:.2f}" if limit else "-",
            f"{commit.median:.2f}", f"{commit.min:.2f}-{commit.max:.2f}",
            f"{figures.sender_cpu_s_per_gb:.3f}", f"{figures.receiver_cpu_s_per_gb:.3f}",
        )  # fmt: skip
    return table


def peers_table(peers: Sequence[PeerRow]) -> Table:
    table = new_table(
        "Other libraries, same cases", "transport", "library", "setting", "case", ">GB/s", ">min-max", ">n"
    )
    for row in peers:
        if row.gb_per_s:
            setting = f"{row.setting}, {'paged' if row.paged else 'contiguous'}"
            table.add_row(row.transport, row.peer, setting, row.case.name, *rate_cells(row.gb_per_s))
    return table


def report_console() -> Console:
    """Standard output, with room for tables where it is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def new_table(title: str, *columns: str) -> Table:
    """A column that begins with ">" holds numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    return table


def rate_cells(rate: Spread) -> tuple[str, str, str]:
    return f"{rate.median:.2f}", f"{rate.min:.2f}-{rate.max:.2f}", str(rate.n)


def notes(report: Report) -> Iterator[str]:
    yield (
        "GB = 1e9 bytes of payload. The limit of shm is perftest's put with error handling, of tcp without (docs/kv_tcp.md). "
        "A cold case is the first transfer of a fresh pair. Baton verifies a checksum of every byte; the others do not."
    )
    yield f"Other processes used {report.foreign_cores:.2f} cores meanwhile."
    for limit in report.limits:
        if not limit.gb_per_s:
            yield f"{limit.transport}: {limit.name} does not run here: {limit.reason}"
    reasons = dict.fromkeys((row.transport, row.peer, row.reason) for row in report.peers if not row.gb_per_s)
    for transport, peer, reason in reasons:
        yield f"{transport}: {peer} does not run here: {reason}"


def to_document(report: Report) -> dict[str, object]:
    return {
        "machine": asdict(this_machine()),
        "ucx_tls": TRANSPORT_TLS,
        "foreign_cores": report.foreign_cores,
        "limits": [asdict(limit) for limit in report.limits],
        "peers": [{**asdict(row), "case": row.case.name} for row in report.peers],
        "results": [row_document(row) for row in report.rows],
    }


def row_document(row: Row) -> dict[str, object]:
    rate, commit = row.figures.gb_per_s, row.figures.commit_ms
    return {
        "transport": row.transport,
        "mode": row.mode,
        "case": row.case.name,
        "layout": row.case.layout_name,
        "tokens": row.case.tokens,
        "transfers": row.case.transfers,
        "warm": row.case.warm,
        "nbytes": row.case.nbytes,
        "gb_per_s": rate.median,
        "min": rate.min,
        "max": rate.max,
        "n": rate.n,
        "commit_ms": commit.median,
        "commit_ms_min": commit.min,
        "commit_ms_max": commit.max,
        "limit_gb_per_s": row.limit_gb_per_s,
        "limit": row.limit.name,
        "cpu_s_per_gb": row.figures.cpu_s_per_gb,
        "sender_cpu_s_per_gb": row.figures.sender_cpu_s_per_gb,
        "receiver_cpu_s_per_gb": row.figures.receiver_cpu_s_per_gb,
        "peers": best_of_peers(row.peers, paged=True),
        "peers_contiguous": best_of_peers(row.peers, paged=False),
    }


def best_of_peers(peers: Sequence[PeerRow], *, paged: bool) -> dict[str, float]:
    """GB/s of each library in its better setting. Ours is always paged: contiguous blocks are another task."""
    best: dict[str, float] = {}
    for row in peers:
        if row.gb_per_s and row.paged == paged:
            best[row.peer] = max(best.get(row.peer, 0.0), row.gb_per_s.median)
    return best
