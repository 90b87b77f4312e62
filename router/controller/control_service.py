"""The Control service: control.proto on the outside, a Controller on the inside. Translates, decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from baton.errors import BatonError, InvalidRequest
from baton.peer_trust import PLAIN, Part, PeerTrust
from baton.request import Role
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2
from router.controller.controller import Controller, tune_pb
from router.controller.fleet_state import Announcement
from router.controller.lenders import lenders_for
from router.controller.starts import NO_WEIGHTS, SOURCES, StartUp


class ControlService(control_pb2_grpc.ControlServicer):
    def __init__(self, controller: Controller, trust: PeerTrust = PLAIN) -> None:
        self._controller = controller
        self._trust = trust

    async def Announce(
        self,
        request: control_pb2.AnnounceRequest,
        context: grpc.aio.ServicerContext[control_pb2.AnnounceRequest, control_pb2.AnnounceResponse],
    ) -> control_pb2.AnnounceResponse:
        await self._trust.admit(context, Part.WORKER)
        try:
            member = self._controller.announce(_announcement(request.worker))
        except BatonError as error:
            await context.abort(grpc.StatusCode[error.grpc_code], error.message)
        return control_pb2.AnnounceResponse(
            role=worker_pb2.Role.ValueType(member.role),
            draining=member.draining,
            tuning=tune_pb(member.tuning) if member.tuning else None,
        )

    async def Watch(
        self,
        request: control_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[control_pb2.WatchRequest, control_pb2.ControlState],
    ) -> AsyncIterator[control_pb2.ControlState]:
        await self._trust.admit(context, Part.ROUTER)
        async for state in self._controller.watch():
            yield state

    async def Report(
        self,
        request: control_pb2.RouterReport,
        context: grpc.aio.ServicerContext[control_pb2.RouterReport, control_pb2.ReportResponse],
    ) -> control_pb2.ReportResponse:
        await self._trust.admit(context, Part.ROUTER)
        self._controller.report(request)
        return control_pb2.ReportResponse()

    async def Leave(
        self,
        request: control_pb2.LeaveRequest,
        context: grpc.aio.ServicerContext[control_pb2.LeaveRequest, control_pb2.LeaveResponse],
    ) -> control_pb2.LeaveResponse:
        await self._trust.admit(context, Part.WORKER)
        return control_pb2.LeaveResponse(drained=await self._controller.leave(request.worker_id))

    async def Lenders(
        self,
        request: control_pb2.LendersRequest,
        context: grpc.aio.ServicerContext[control_pb2.LendersRequest, control_pb2.LendersResponse],
    ) -> control_pb2.LendersResponse:
        await self._trust.admit(context, Part.WORKER)
        lenders = lenders_for(self._controller.fleet.members(), request.worker_id, request.fingerprint)
        return control_pb2.LendersResponse(
            workers=[
                worker_pb2.Peer(worker_id=member.worker_id, epoch=member.epoch, address=member.address)
                for member in lenders
            ]
        )


def _announcement(record: control_pb2.WorkerRecord) -> Announcement:
    if not (record.worker_id and record.epoch and record.address):
        raise InvalidRequest("worker_id, epoch and address must be set", field="worker")
    try:
        role = Role(record.role)
    except ValueError:
        raise InvalidRequest(f"role {record.role} is none of prefill, decode, both", field="worker.role") from None
    source = record.weights_from if record.weights_from in SOURCES else NO_WEIGHTS  # a label: not whatever is sent
    return Announcement(
        record.worker_id, record.epoch, record.address, role, record.pid, record.shape, record.fingerprint,
        StartUp(source, record.weights_s, record.start_s),
    )  # fmt: skip
