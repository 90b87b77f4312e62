"""Counters, gauges and histograms as Prometheus reads them, cheap to count and to read in small parts.

A library with locks and checks per observation took 35 us of every call and up to 150 ms of every scrape with a thousand
workers; both come out of the event loop's time. So: children are found by one dictionary look-up, sorted observations are
counted together, and the page is an iterator of lines that its reader may leave and resume. Names and labels are the
programmer's, only label values are escaped. Event loop only.
Format: https://prometheus.io/docs/instrumenting/exposition_formats/, text 0.0.4.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

CONTENT_TYPE = "text/plain; version=0.0.4"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Source(Protocol):
    """Something with lines of its own on the page."""

    def lines(self) -> Iterator[str]: ...


class Registry:
    """What a page consists of."""

    def __init__(self) -> None:
        self._sources: list[Source] = []

    def add(self, source: Source) -> None:
        self._sources.append(source)

    def lines(self) -> Iterator[str]:
        """Each with its newline. Counts may change between two of them, as between any two scrapes."""
        for source in self._sources:
            yield from source.lines()


def header(name: str, text: str, kind: str) -> str:
    """The two lines before a metric's samples; `kind`: counter, gauge or histogram."""
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def labelled(names: Sequence[str], values: Sequence[str]) -> str:
    """a="x",b="y" """
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True))


def sample(name: str, labels: str, value: float) -> str:
    """One line; integers are written as Prometheus's own libraries do, 1.0."""
    return f"{name}{{{labels}}} {float(value)!r}\n" if labels else f"{name} {float(value)!r}\n"


class CounterChild:
    """One number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, by: float = 1.0) -> None:
        self.value += by

    def lines(self, name: str, labels: str) -> Iterator[str]:
        yield sample(name, labels, self.value)


class HistogramChild:
    """Observations by the first bound that is not below them."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last: above every bound
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_sorted(self, values: Sequence[float]) -> None:
        """Count many at once, given in ascending order: one search per bound instead of one per value."""
        num_below = 0
        for place, bound in enumerate(self._bounds):
            if num_below == len(values):
                break
            num_to_bound = bisect_right(values, bound, num_below)
            self._counts[place] += num_to_bound - num_below
            num_below = num_to_bound
        self._counts[-1] += len(values) - num_below
        self._sum += sum(values)

    def lines(self, name: str, labels: str) -> Iterator[str]:
        end = f",{labels}}}" if labels else "}"
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            yield f'{name}_bucket{{le="{float(bound)!r}"{end} {float(total)!r}\n'
        total += self._counts[-1]
        yield f'{name}_bucket{{le="+Inf"{end} {float(total)!r}\n'
        yield sample(f"{name}_count", labels, total)
        yield sample(f"{name}_sum", labels, self._sum)


class _Child(Protocol):
    def lines(self, name: str, labels: str) -> Iterator[str]: ...


Child = TypeVar("Child", bound=_Child)


class _Family(Generic[Child]):
    """One metric: a child for every combination of label values that was ever asked for."""

    def __init__(self, name: str, text: str, kind: str, names: Sequence[str], new_child: Callable[[], Child]) -> None:
        self._name, self._text, self._kind, self._names = name, text, kind, names
        self._new_child = new_child
        self._children: dict[tuple[str, ...], Child] = {}

    def labels(self, *values: str) -> Child:
        """The child with these label values, in the order of the names; they must be bounded in number."""
        child = self._children.get(values)
        if child is None:
            assert len(values) == len(self._names)
            child = self._children[values] = self._new_child()
        return child

    def lines(self) -> Iterator[str]:
        yield header(self._name, self._text, self._kind)
        for values, child in list(self._children.items()):
            yield from child.lines(self._name, labelled(self._names, values))


class Counter(_Family[CounterChild]):
    """Counts; `name` without the _total that its samples get."""

    def __init__(self, name: str, text: str, names: Sequence[str], registry: Registry) -> None:
        super().__init__(f"{name}_total", text, "counter", names, CounterChild)
        registry.add(self)


class Histogram(_Family[HistogramChild]):
    """Distributions over `buckets`, ascending upper bounds without the infinite one."""

    def __init__(
        self, name: str, text: str, names: Sequence[str], registry: Registry, buckets: Sequence[float]
    ) -> None:  # fmt: skip
        super().__init__(name, text, "histogram", names, lambda: HistogramChild(buckets))
        registry.add(self)


class Gauge:
    """One number without labels, read when it is asked for."""

    def __init__(self, name: str, text: str, read: Callable[[], float], registry: Registry) -> None:
        self._name, self._text, self._read = name, text, read
        registry.add(self)

    def lines(self) -> Iterator[str]:
        yield header(self._name, self._text, "gauge") + sample(self._name, "", self._read())
