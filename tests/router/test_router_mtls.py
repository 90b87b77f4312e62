"""A router under mTLS: it serves through workers of its cluster, and says why it cannot where they are not."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from baton.config import RouterConfig
from baton.errors import ConfigError
from baton.model_files import ModelFiles
from baton.peer_trust import PLAIN, Part
from router.front_end import FrontEnd
from tests.cluster_certificates import Authority, needs_openssl
from tests.router.router_rig import request, running_rig, until
from tests.router.stub_worker import start_pair

pytestmark = needs_openssl


async def test_calls_are_served_through_workers_of_the_same_cluster(files: ModelFiles, authority: Authority) -> None:
    workers = await start_pair(trust=authority.trust(Part.WORKER))
    async with running_rig(files, workers, tls_dir=str(authority.of(Part.ROUTER))) as rig:
        assert (await rig.generate(request(max_tokens=3))).token_ids == [300, 301, 302]


@pytest.mark.parametrize(
    ("router_has", "workers_have", "reason"),
    [
        ("ours", "nothing", "it speaks plain text, this side TLS"),
        ("nothing", "ours", "as a TLS port does that is spoken to in plain text"),
        ("ours", "another cluster's", "its certificate is not of this cluster's authority"),
        ("ours", "a router's", "its certificate names another part"),
    ],
)
async def test_a_router_that_its_workers_refuse_is_unready_and_says_why_once(
    files: ModelFiles,
    authority: Authority,
    stranger: Authority,
    caplog: pytest.LogCaptureFixture,
    router_has: str,
    workers_have: str,
    reason: str,
) -> None:
    trust = {
        "nothing": PLAIN,
        "ours": authority.trust(Part.WORKER),
        "another cluster's": stranger.trust(Part.WORKER),
        "a router's": authority.trust(Part.ROUTER),
    }[workers_have]
    workers = await start_pair(trust=trust)
    folder = str(authority.of(Part.ROUTER)) if router_has == "ours" else ""
    async with running_rig(files, workers, wait_ready=False, tls_dir=folder, unavailable_wait_s=0.0) as rig:
        await until(lambda: reason in rig.front_end.fleet.unready_reason(), reason)
        assert reason in (await rig.http.get("/readyz")).text
        answer = await rig.generate(request(max_tokens=3))
        assert answer.status is not None
        assert answer.status.code() is grpc.StatusCode.UNAVAILABLE
        sessions = [endpoint.session for endpoint in rig.front_end.fleet.endpoints]
        await until(lambda: all(reason in session.reason for session in sessions), "both were tried")
        assert not workers[0].submits
    told = [record for record in caplog.records if record.getMessage() == "worker_unreachable"]
    assert len(told) == 2, "one line per worker, however often it is tried"


def test_a_router_without_its_certificate_does_not_start(files: ModelFiles, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ca\.crt cannot be used: No such file"):
        FrontEnd(RouterConfig(http_port=0, grpc_port=0, tls_dir=str(tmp_path)), files)
