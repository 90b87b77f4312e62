"""The SLO classes in force at this router and the verdicts on its calls, counted per class.

Classes arrive whole with each ControlState and replace the old set; until then the defaults hold (version 0). A call is
judged by the targets that were in force when it arrived. Event loop only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from baton.errors import InvalidRequest
from baton.slo import DEFAULT_CLASSES, SLO, Verdict
from baton.v1 import control_pb2
from router.call_spec import CallLabels

DEFAULT_CLASS = "interactive"  # serving.proto, Slo.class_name


@dataclass(slots=True)
class SloWatch:
    version: int = 0
    classes: dict[str, SLO] = field(default_factory=lambda: {slo.name: slo for slo in DEFAULT_CLASSES})
    verdicts: defaultdict[str, Counter[Verdict]] = field(default_factory=lambda: defaultdict(Counter))

    def apply(self, slos: control_pb2.SloSet) -> None:
        """Take over the controller's classes; an empty set says nothing."""
        if slos.classes:
            self.version = slos.version
            self.classes = {pb.name: _from_pb(pb) for pb in slos.classes}

    def targets(self, labels: CallLabels) -> SLO:
        """The targets of one call: its class's, as overridden by the call itself.

        Raises:
            InvalidRequest: an unknown class.
        """
        name = labels.slo_class or DEFAULT_CLASS
        slo = self.classes.get(name)
        if slo is None:
            known = ", ".join(sorted(self.classes))
            raise InvalidRequest(
                f"slo.class_name is no known class; the limit is one of {known}", field="slo.class_name"
            )
        if labels.slo_ttft_ms is not None:
            slo = replace(slo, ttft_ms=labels.slo_ttft_ms)
        if labels.slo_tpot_ms is not None:
            slo = replace(slo, tpot_ms=labels.slo_tpot_ms)
        return slo

    @property
    def itl_p99_ms(self) -> float:
        """The least of all classes: what no stream may be held up for, since nobody knows whose others are. 0 = no class says."""
        return min((slo.itl_p99_ms for slo in self.classes.values() if slo.itl_p99_ms is not None), default=0.0)

    def count(self, class_name: str, verdict: Verdict) -> None:
        self.verdicts[class_name][verdict] += 1

    def totals(self) -> Iterable[control_pb2.ClassVerdicts]:
        """Since the router's start."""
        for name, counts in self.verdicts.items():
            yield control_pb2.ClassVerdicts(
                class_name=name,
                num_met=counts[Verdict.MET],
                num_missed_ttft=counts[Verdict.TTFT],
                num_missed_tpot=counts[Verdict.TPOT],
                num_missed_itl=counts[Verdict.ITL],
                num_missed_e2e=counts[Verdict.E2E],
                num_failed=counts[Verdict.FAILED],
            )


def _from_pb(pb: control_pb2.SloClass) -> SLO:
    return SLO(
        name=pb.name,
        ttft_ms=pb.ttft_ms,
        tpot_ms=pb.tpot_ms,
        itl_p99_ms=pb.itl_p99_ms if pb.HasField("itl_p99_ms") else None,
        e2e_ms=pb.e2e_ms if pb.HasField("e2e_ms") else None,
        percentile=pb.percentile,
        weight=pb.weight,
        priority=pb.priority,
    )
