"""`baton up --tls-dir`: one setting for all parts, looked at before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config_load import load
from baton.errors import ConfigError
from baton.peer_trust import Part
from cli.main import main
from tests.cluster_certificates import Authority, needs_openssl

PORTS = ("--http-port", "0", "--grpc-port", "0", "--admin-port", "0")


@pytest.mark.parametrize("part", list(Part))
@needs_openssl
def test_a_certificate_that_cannot_be_used_is_one_line_before_anything_starts(
    authority: Authority, capsys: pytest.CaptureFixture[str], part: Part
) -> None:
    (authority.of(part) / "tls.key").write_text("garbage")
    assert main(["up", *PORTS, "--tls-dir", str(authority.folder)]) == 1
    said = capsys.readouterr().err
    assert f"{part}/tls.key cannot be used: it is not PEM" in said.replace("\n", "")
    assert "Starting" not in said


def test_every_part_gets_its_own_folder_of_the_one_that_is_set(tmp_path: Path) -> None:
    cluster = load(None, {"BATON__TLS_DIR": str(tmp_path)}, {}).config
    assert cluster.router.tls_dir == str(tmp_path / "router")
    assert cluster.tls_dir_of("worker") == str(tmp_path / "worker")
    assert load(None, {}, {}).config.router.tls_dir == ""


def test_a_routers_own_folder_cannot_disagree_with_the_clusters() -> None:
    with pytest.raises(ConfigError, match=r"router\.tls_dir .* follows tls_dir; set that one"):
        load(None, {"BATON__ROUTER__TLS_DIR": "/elsewhere"}, {})
