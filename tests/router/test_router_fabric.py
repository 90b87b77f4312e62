"""A router whose pairs must be of one fabric, with real Sessions."""

from __future__ import annotations

import pytest

from baton.model_files import ModelFiles
from baton.v1 import worker_pb2
from tests.router.router_rig import request, running_rig
from tests.router.stub_worker import StubWorker


@pytest.mark.parametrize("one_fabric", [True, False])
async def test_kv_goes_to_another_fabric_only_where_that_is_allowed(files: ModelFiles, one_fabric: bool) -> None:
    prefill = await StubWorker("p0", worker_pb2.ROLE_PREFILL, fabric="east").start()
    decode = await StubWorker("d0", worker_pb2.ROLE_DECODE, fabric="west").start()
    prefill.peers["d0"] = decode
    async with running_rig(files, [prefill, decode], one_fabric=one_fabric) as rig:
        assert len((await rig.generate(request(max_tokens=3))).token_ids) == 3
    assert (len(prefill.submits), len(decode.submits)) == ((0, 1) if one_fabric else (1, 0))
