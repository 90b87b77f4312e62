"""API keys: who a caller is, what its key allows, and what becomes of a file that changes or is wrong."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from baton.errors import ConfigError, InvalidRequest, Unauthenticated
from router.key_file import KeyFile
from router.tenants import OPEN, KeyRing, Tenant, new_key, parse_keys


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, key: str, **settings: object) -> dict[str, object]:
    return {"name": name, "sha256": sha256(key), **settings}


def text(*entries: dict[str, object]) -> str:
    return json.dumps({"keys": entries})


def test_a_key_is_known_by_bearer_and_by_x_api_key() -> None:
    key = new_key()
    ring = parse_keys([text(entry("search", key, weight=2, slo_classes=["batch"], requests_per_min=60))])
    for fields in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer {key}"}, {"x-api-key": key}):
        tenant = ring.tenant(fields)
        assert (tenant.name, tenant.weight, tenant.requests_per_min) == ("search", 2.0, 60.0)
        assert tenant.slo_classes == {"batch"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": "Basic abc"},
        {"x-api-key": "bk-wrong"},
        {"x-api-key": "\udcff" * 9},
    ],
)
def test_who_has_no_known_key_is_refused_by_the_headers_name(fields: dict[str, str]) -> None:
    ring = parse_keys([text(entry("search", new_key()))])
    with pytest.raises(Unauthenticated) as caught:
        ring.tenant(fields)
    assert caught.value.field == "authorization"
    assert "wrong" not in caught.value.message


def test_without_a_file_everybody_is_the_open_tenant() -> None:
    assert KeyRing().tenant({}) is OPEN
    OPEN.check("batch", 100)
    assert OPEN.salt == b""


def test_keys_of_one_name_are_one_tenant() -> None:
    old, new = new_key(), new_key()
    ring = parse_keys([text(entry("a", old, weight=3)), text(entry("a", new, weight=3))])
    assert ring.tenant({"x-api-key": old}) == ring.tenant({"x-api-key": new})
    assert list(ring.tenants) == ["a"]


def test_tenants_share_cached_prefixes_only_where_both_say_so() -> None:
    salts = [Tenant("a").salt, Tenant("b").salt, Tenant("c", share_cache=True).salt, Tenant("d", share_cache=True).salt]
    assert salts[0] != salts[1]
    assert salts[2] == salts[3] == OPEN.salt


def test_a_key_allows_no_more_than_its_classes_and_priority() -> None:
    tenant = parse_keys([text(entry("a", "k", slo_classes=["batch"], max_priority=5))]).tenant({"x-api-key": "k"})
    tenant.check("batch", 5)
    with pytest.raises(InvalidRequest, match="interactive") as caught:
        tenant.check("interactive", 0)
    assert caught.value.field == "slo.class_name"
    with pytest.raises(InvalidRequest, match="the limit of this key is 5"):
        tenant.check("batch", 6)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("[", "neither YAML nor JSON"),
        ("- 1", "no list `keys`"),
        (text(entry("a b", "k")), "API key 1: name must match"),
        (text(entry("open", "k")), "name must match"),
        (text({"name": "a", "sha256": "zz"}), "sha256 must be 64"),
        (text(entry("a", "k", wieght=2)), "wieght is no setting; those are max_concurrent"),
        (text(entry("a", "k", weight=0)), "weight must be a number above 0"),
        (text(entry("a", "k", max_concurrent=float("inf"))), "max_concurrent must be a number"),
        (text(entry("a", "k", share_cache="yes")), "share_cache must be true or false"),
        (text(entry("a", "k"), entry("b", "k")), "API key 2: sha256 is that of an earlier one"),
        (
            text(entry("a", "k"), entry("a", "l", weight=2)),
            "API key 2: name is a, of which an earlier one has other limits",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_entry_and_field(wrong: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys([wrong])
    assert says in caught.value.message


def test_a_secret_in_a_broken_file_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(['{"keys": [{"name": "bk-secret", "sha256": "bk-secret'])
    assert "bk-secret" not in caught.value.message


async def test_a_changed_file_is_followed_and_a_bad_one_keeps_the_last_good(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text(entry("a", "k")))
    keys = KeyFile(str(path))
    assert keys.ring.tenant({"x-api-key": "k"}).name == "a"
    assert not await keys.check()
    path.write_text(text(entry("a", "k"), entry("b", "second")))
    assert await keys.check()
    assert keys.ring.tenant({"x-api-key": "second"}).name == "b"
    for damage in ("{", ""):
        path.write_text(damage)
        assert not await keys.check()
        assert keys.ring.tenant({"x-api-key": "second"}).name == "b"
    path.unlink()
    assert not await keys.check()
    assert keys.ring.tenant({"x-api-key": "second"}).name == "b"
    path.write_text(text(entry("a", "k")))
    assert await keys.check()
    with pytest.raises(Unauthenticated):
        keys.ring.tenant({"x-api-key": "second"})


async def test_a_mounted_secret_is_followed_when_its_links_are_swapped(tmp_path: Path) -> None:
    for version, name in (("v1", "a"), ("v2", "b")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys.yaml").write_text(text(entry(name, "k")))
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "..data").symlink_to(tmp_path / "v1")
    (mount / "keys.yaml").symlink_to(mount / "..data" / "keys.yaml")
    keys = KeyFile(str(mount))
    assert keys.ring.tenant({"x-api-key": "k"}).name == "a"
    (mount / "..next").symlink_to(tmp_path / "v2")
    os.replace(mount / "..next", mount / "..data")
    assert await keys.check()
    assert keys.ring.tenant({"x-api-key": "k"}).name == "b"


def test_a_missing_file_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_keys_file"):
        KeyFile(str(tmp_path / "none.yaml"))
