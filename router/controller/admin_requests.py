"""/admin/v1/requests: why a request's sequences went where they went, from the router that placed them."""

from __future__ import annotations

import json

from fastapi import APIRouter, Depends

from baton.errors import NotFound
from router.controller.admin_access import Doors
from router.controller.controller import Controller


def request_routes(controller: Controller, doors: Doors) -> APIRouter:
    api = APIRouter(prefix="/admin/v1")

    @api.get("/requests/{request_id}", dependencies=[Depends(doors.view)])
    async def explain(request_id: str) -> dict[str, object]:
        answers = await controller.explain(request_id)
        if not answers:
            raise NotFound(
                "no router remembers placing this request; each keeps its last 1,024, and of a busy second 100",
                field="request_id",
            )
        placements = [
            {"router": answer.router_id, **placement} for answer in answers for placement in json.loads(answer.json)
        ]
        return {"request_id": request_id, "placements": placements}

    return api
