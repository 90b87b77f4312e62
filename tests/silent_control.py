"""A Control service that nobody may ask: tests override what theirs is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from baton.v1 import control_pb2, control_pb2_grpc


class SilentControl(control_pb2_grpc.ControlServicer):
    async def Announce(self, request: Any, context: Any) -> control_pb2.AnnounceResponse:
        raise AssertionError("nobody announces itself")

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[control_pb2.ControlState]:
        raise AssertionError("nobody watches")
        yield

    async def Report(self, request: Any, context: Any) -> control_pb2.ReportResponse:
        raise AssertionError("nobody reports")

    async def Leave(self, request: Any, context: Any) -> control_pb2.LeaveResponse:
        raise AssertionError("nobody leaves")

    async def Lenders(self, request: Any, context: Any) -> control_pb2.LendersResponse:
        raise AssertionError("nobody looks for weights")
