"""What a change of the SLO classes is: merging, comparing, and targets that contradict each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from baton.slo import SLO

DEFAULT_CLASS = "interactive"  # of calls that name none: serving.proto Slo.class_name
Scalar = str | float | int | None


@dataclass(frozen=True, slots=True)
class Change:
    """One field, or, where `field` is empty, a whole class that came or went."""

    class_name: str
    field: str
    old: Scalar = None
    new: Scalar = None


def changes(old: Iterable[SLO], new: Iterable[SLO]) -> Iterator[Change]:
    """In the order of the new set, then what was removed."""
    before = {slo.name: asdict(slo) for slo in old}
    for slo in new:
        fields, known = asdict(slo), before.pop(slo.name, None)
        if known is None:
            yield Change(slo.name, "", None, "added")
            known = {}
        for name, value in fields.items():
            if name != "name" and known.get(name) != value:
                yield Change(slo.name, name, known.get(name), value)
    for name in before:
        yield Change(name, "", "removed", None)


def with_class(classes: Iterable[SLO], changed: SLO) -> tuple[SLO, ...]:
    """The set with one class replaced, in its place, or added."""
    return tuple({**{slo.name: slo for slo in classes}, changed.name: changed}.values())


def contradiction(slo: SLO) -> tuple[str, str] | None:
    """A field, and why no call could meet it together with another one."""
    if slo.e2e_ms is not None and slo.e2e_ms < slo.ttft_ms:
        return "e2e_ms", f"{slo.e2e_ms:g} is below ttft_ms = {slo.ttft_ms:g}: a call cannot end before its first token"
    return None
