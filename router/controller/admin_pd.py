"""/admin/v1/pd: whether prefill and decode apart pay on the traffic of late. Read only; what is done about it: decisions."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Depends

from router.controller.admin_access import Doors
from router.controller.autoscaler.disaggregation import Verdict
from router.controller.feasibility import NO_FORECAST
from router.controller.pays import Pays, sentence

_SAYS = {True: "pays", False: "does_not_pay", None: "no_difference"}


def pd_routes(pays: Pays | None, doors: Doors) -> APIRouter:
    api = APIRouter(prefix="/admin/v1", dependencies=[Depends(doors.view)])

    @api.get("/pd")
    async def pd() -> dict[str, object]:
        """The newest verdict; where there is none, it is looked for now."""
        if pays is None:
            return {"available": False, "reason": NO_FORECAST}
        if pays.verdict is None:
            await pays.look()
        if (found := pays.fresh()) is None:
            return {"available": False, "reason": pays.reason}
        verdict, age_s = found
        return {"available": True, "age_s": round(age_s, 1), "period_s": pays.period_s, **_verdict_json(verdict)}

    return api


def _verdict_json(verdict: Verdict) -> dict[str, object]:
    return {
        "verdict": _SAYS[verdict.pays],
        "said": sentence(verdict),
        "present": verdict.present,
        "arrived_per_s": verdict.rate,
        "num_calls": verdict.num_calls,
        "layouts": {name: asdict(layout) for name, layout in verdict.layouts.items()},
        "less_apart": {
            name: asdict(difference)
            for name, difference in (("local", verdict.local), ("colocated", verdict.colocated))
            if difference is not None
        },
        "unknown": dict(verdict.unknown),
        "assumptions": verdict.assumptions,
    }
