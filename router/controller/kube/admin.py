"""What the admin endpoint says of the cluster: /leaderz, whether this is the leader, and /admin/v1/kubernetes for operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from fastapi import APIRouter, Depends, Response

from router.controller.admin_access import Doors
from router.controller.kube.status import Status


def kube_routes(status: Callable[[], Status], leads: Callable[[], bool], doors: Doors) -> APIRouter:
    api = APIRouter()

    @api.get("/leaderz")
    async def leaderz(response: Response) -> dict[str, object]:
        """503 while the Lease is not held; a leader whose API server is away serves routers on, until another one leads."""
        if not leads():
            response.status_code = 503
        return {"leads": leads()}

    @api.get("/admin/v1/kubernetes", dependencies=[Depends(doors.view)])
    async def kubernetes() -> dict[str, object]:
        return asdict(status())

    return api
