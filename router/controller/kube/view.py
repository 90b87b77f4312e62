"""What is shown of the cluster, on the admin endpoint and on the metrics page. Event loop only."""

from __future__ import annotations

from collections.abc import Iterator

from router.controller.controller import Controller
from router.controller.kube.client import CallCounts
from router.controller.kube.homes import Homes
from router.controller.kube.lease import KubeLease
from router.controller.kube.seeds import drift
from router.controller.kube.status import Conditions, SizeStatus, Status
from router.controller.kube.upgrade import Upgrade
from router.controller.slo_store import SLOSet
from router.series import header, labelled, sample


class View:
    def __init__(
        self,
        controller: Controller,
        lease: KubeLease,
        counts: CallCounts,
        homes: Homes,
        told: Conditions,
        seeded: SLOSet | None,
        upgrade: Upgrade,
    ) -> None:
        """`seeded`: SLO classes as the chart's values have them; None: they have none."""
        self._controller = controller
        self._lease = lease
        self._counts = counts
        self._homes = homes
        self._told = told
        self._seeded = seeded
        self._upgrade = upgrade

    def status(self) -> Status:
        return Status(
            leads=self._lease.is_held,
            holder=self._lease.holder_seen,
            api_silence_s=self._counts.age_s,
            sizes=tuple(self._sizes()),
            conditions=self._told.held(),
            slo_drift=tuple(drift(self._seeded, self._controller.slo.value)) if self._seeded is not None else (),
            upgrade=self._upgrade.describe(),
        )

    def _sizes(self) -> Iterator[SizeStatus]:
        for home in self._homes.items():
            if (size := self._homes.size(home)) is not None:
                yield SizeStatus(home, size.desired, size.ready, size.pending)

    def lines(self) -> Iterator[str]:
        yield from self._told.lines()
        name = "baton_kube_pods_desired"
        yield header(name, "Size of each pool's set, as the API server has it.", "gauge")
        for size in self._sizes():
            yield sample(name, labelled(("home",), (size.home,)), size.desired)
        name = "baton_slo_drift_fields"
        yield header(name, "Fields of SLO classes that differ from the chart's values.", "gauge")
        yield sample(name, "", len(self.status().slo_drift))
