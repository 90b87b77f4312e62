"""SLO classes, settings and the fleet in ConfigMaps: versions, bounds, and writers that meet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config import KubernetesConfig
from baton.config_load import load
from baton.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from baton.request import Role
from baton.slo import DEFAULT_CLASSES, SLO
from router.controller.fleet_state import FAILED, Member, SavedFleet
from router.controller.fleet_store import fleet_to_json
from router.controller.kube import documents
from router.controller.kube.api import KubeApi
from router.controller.kube.documents import ConfigMapVersions
from router.controller.kube.saved_fleet import ConfigMapFleet
from router.controller.kube.seeds import drift, put_values_in_force, seeded_budget, seeded_classes
from router.controller.settings import Budget, ControlSettings, Mode, PoolBounds, settings_format
from router.controller.slo_store import SLO_SET, SLOSet
from router.controller.versioned import StaleVersion
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_faults import Fault
from tests.kube.kube_rig import NAMESPACE, config_map, kube_api

CHAT = SLO("interactive", ttft_ms=500.0, tpot_ms=20.0)


@pytest.fixture
def fake() -> Iterator[FakeApi]:
    with FakeApi() as fake:
        fake.load([config_map("demo-slo"), config_map("demo-fleet")], NAMESPACE)
        yield fake


@pytest.fixture
def api(fake: FakeApi, tmp_path: Path) -> Iterator[KubeApi]:
    with kube_api(fake, tmp_path) as api:
        yield api


def slo_of(api: KubeApi, default: SLOSet = DEFAULT_CLASSES) -> ConfigMapVersions[SLOSet]:
    return ConfigMapVersions(api, "demo-slo", replace(SLO_SET, default=default), lambda: 7.0)


def settings_of(api: KubeApi) -> ConfigMapVersions[ControlSettings]:
    return ConfigMapVersions(api, "demo-slo", settings_format({"prefill": 1}), lambda: 7.0)


# -- documents -------------------------------------------------------------------------------------------------------


def test_a_new_document_is_its_default_and_an_older_one_is_found_again(api: KubeApi) -> None:
    first = slo_of(api)
    assert (first.current().version, first.current().value) == (1, DEFAULT_CLASSES)
    first.replace(1, (CHAT,), "ann", "a launch")
    found = slo_of(api, default=()).current()
    assert (found.version, found.value, found.who, found.reason) == (2, (CHAT,), "ann", "a launch")


def test_of_two_writers_of_one_version_one_wins(api: KubeApi) -> None:
    first, second = slo_of(api), slo_of(api)
    first.replace(1, (CHAT,), "ann", "")
    with pytest.raises(StaleVersion, match="version 2 is in force, set by ann"):
        second.replace(1, (), "bob", "")
    assert second.current().value == (CHAT,)


def test_two_documents_of_one_object_do_not_undo_each_other(fake: FakeApi, api: KubeApi) -> None:
    """The second is written between reading and writing of the first."""
    slo, settings = slo_of(api), settings_of(api)
    fault = fake.faults.add(Fault(verb="update", resource="configmaps", code=409, times=1))
    slo.replace(1, (CHAT,), "ann", "")
    settings.replace(1, ControlSettings(Mode.AUTO, Budget(8)), "bob", "")
    assert fault.hits == 1
    assert (slo.current().value, settings.current().value.mode) == ((CHAT,), Mode.AUTO)
    assert [revision.version for revision in slo.history(10)] == [2, 1]


def test_history_is_paged_and_old_versions_are_found_or_said_to_be_gone(api: KubeApi) -> None:
    slo = slo_of(api)
    for version in range(1, 6):
        slo.replace(version, (replace(CHAT, ttft_ms=float(version)),), "ann", f"number {version}")
    assert [revision.version for revision in slo.history(2, before=5)] == [4, 3]
    assert slo.revision(3).reason == "number 2"
    with pytest.raises(NotFound, match="no slo version 9"):
        slo.revision(9)


def test_history_is_bounded_in_bytes_and_the_oldest_go_first(
    fake: FakeApi, api: KubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_HISTORY_BYTES", 1_000)
    slo = slo_of(api)
    for version in range(1, 21):
        slo.replace(version, (CHAT,), "ann", "x" * 100)
    kept = [revision.version for revision in slo.history(100)]
    assert kept == list(range(21, 21 - len(kept), -1))
    assert 2 < len(kept) < 8
    assert len(api.config_map("demo-slo").data["slo.history.json"]) <= 1_000


def test_what_no_config_map_could_hold_is_refused(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_CURRENT_BYTES", 1_000)
    slo = slo_of(api)
    with pytest.raises(InvalidRequest, match="more than a ConfigMap keeps"):
        slo.replace(1, tuple(replace(CHAT, name=f"class-{n}") for n in range(64)), "ann", "")
    assert slo.current().version == 1


def test_both_documents_at_their_largest_fit_into_what_the_server_takes() -> None:
    largest = 2 * (documents.MAX_CURRENT_BYTES + documents.MAX_HISTORY_BYTES)
    assert largest <= 1 << 20


def test_a_server_that_is_away_is_unavailable_and_an_object_that_is_emptied_gives_no_defaults(
    fake: FakeApi, api: KubeApi
) -> None:
    slo = slo_of(api)
    slo.replace(1, (CHAT,), "ann", "")
    with fake.away(), pytest.raises(Unavailable):
        slo.replace(2, (), "ann", "")
    read = api.config_map("demo-slo")
    api.put_config_map("demo-slo", read, {})
    with pytest.raises(Unavailable, match="the last one stays in force"):
        slo.current()


def test_an_object_that_is_missing_or_nonsense_is_one_clear_line(fake: FakeApi, api: KubeApi) -> None:
    with pytest.raises(ConfigError, match="`helm upgrade` renders one that is missing"):
        ConfigMapVersions(api, "other", SLO_SET, lambda: 7.0)
    api.put_config_map("demo-slo", api.config_map("demo-slo"), {"slo.json": "{"})
    with pytest.raises(ConfigError, match="cannot use the slo document in ConfigMap demo-slo"):
        slo_of(api)


def test_it_reads_as_what_it_is(api: KubeApi) -> None:
    """`kubectl get configmap -o yaml` is a backup that people can read."""
    slo_of(api).replace(1, (CHAT,), "ann", "a launch")
    [body] = json.loads(api.config_map("demo-slo").data["slo.json"])["value"]
    assert (body["name"], body["ttft_ms"]) == ("interactive", 500.0)


# -- the fleet -------------------------------------------------------------------------------------------------------

FLEET = SavedFleet((Member("demo-decode-0", Role.DECODE, epoch=5),), frozenset({("demo-decode-0", 4)}))


def test_the_next_leader_finds_the_fleet(api: KubeApi) -> None:
    fleets = ConfigMapFleet(api, "demo-fleet")
    assert fleets.load().is_new
    fleets.save(FLEET)
    assert ConfigMapFleet(api, "demo-fleet").load() == FLEET


def test_who_led_before_does_not_overwrite_what_its_successor_wrote(api: KubeApi) -> None:
    old, new = ConfigMapFleet(api, "demo-fleet"), ConfigMapFleet(api, "demo-fleet")
    old.load()
    old.save(FLEET)
    new.load()
    new.save(replace(FLEET, ended=("demo-decode-1",)))
    with pytest.raises(OSError, match="written by another controller"):
        old.save(FLEET)
    assert new.load().ended == ("demo-decode-1",)


def test_a_label_that_somebody_puts_there_hinders_nobody(fake: FakeApi, api: KubeApi) -> None:
    fleets = ConfigMapFleet(api, "demo-fleet")
    fleets.load()
    fleets.save(FLEET)
    read = api.config_map("demo-fleet")
    meta = {**read.body["metadata"], "labels": {"team": "ours"}}
    api.put_config_map("demo-fleet", replace(read, body={**read.body, "metadata": meta}), read.data)
    fleets.save(replace(FLEET, ended=("demo-decode-1",)))
    assert fleets.load().ended == ("demo-decode-1",)


def test_a_server_that_is_away_is_a_disk_that_is_full(fake: FakeApi, api: KubeApi) -> None:
    """The controller tries those again."""
    fleets = ConfigMapFleet(api, "demo-fleet")
    fleets.load()
    with fake.away(), pytest.raises(OSError, match="away"):
        fleets.save(FLEET)
    fleets.save(FLEET)


# -- seeds -----------------------------------------------------------------------------------------------------------


def seed(folder: Path, *classes: object) -> KubernetesConfig:
    file = folder / "slo.json"
    file.write_text(json.dumps(classes))
    return KubernetesConfig(slo_seed=str(file))


def test_values_are_defaults_of_a_new_store_only(api: KubeApi, tmp_path: Path) -> None:
    config = seed(tmp_path, {"name": "interactive", "ttft_ms": 500, "tpot_ms": 20.0})
    classes = seeded_classes(config, DEFAULT_CLASSES)
    assert classes == (CHAT,)
    slo_of(api, classes).replace(1, (replace(CHAT, ttft_ms=300.0),), "ann", "")
    live = slo_of(api, classes).current().value
    assert live[0].ttft_ms == 300.0
    assert [(one.class_name, one.field, one.old, one.new) for one in drift(classes, live)] == [
        ("interactive", "ttft_ms", 500.0, 300.0)
    ]


def test_values_that_rule_are_put_in_force_once(api: KubeApi) -> None:
    slo = slo_of(api)
    put_values_in_force(slo, (CHAT,))
    put_values_in_force(slo, (CHAT,))
    assert (slo.current().version, slo.current().value, slo.current().who) == (2, (CHAT,), "chart")


def test_without_a_seed_the_defaults_hold() -> None:
    assert seeded_classes(KubernetesConfig(), DEFAULT_CLASSES) == DEFAULT_CLASSES


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ([{"name": "a", "ttft_ms": -1.0, "tpot_ms": 20.0}], "ttft_ms"),
        ([{"name": "a", "ttft_ms": 500.0}], "tpot_ms"),
        ([{"ttft_ms": 500.0, "tpot_ms": 20.0}], "name"),
        ([{"name": "a", "ttft_ms": 500.0, "tpot_ms": 20.0, "ttft": 1}], "ttft"),
        ([{"name": "a", "ttft_ms": 500.0, "tpot_ms": 20.0}] * 2, "its own name"),
        ([], "1 to 64 classes"),
        ([{"name": "a", "ttft_ms": 500.0, "tpot_ms": 20.0, "e2e_ms": 400.0}], "cannot end before its first token"),
    ],
)
def test_seeds_that_make_no_sense_are_refused_by_name(tmp_path: Path, classes: list[object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        seeded_classes(seed(tmp_path, *classes), DEFAULT_CLASSES)


def test_bounds_of_values_are_the_first_budget() -> None:
    config = KubernetesConfig(prefill_min=0, prefill_max=4, decode_min=2, both_min=1, both_max=3)
    expected = Budget(16, prefill=PoolBounds(0, 4), decode=PoolBounds(2, None), both=PoolBounds(1, 3))
    assert seeded_budget(config, Budget(16)) == expected


def test_the_record_of_the_largest_fleet_fits_into_a_config_map() -> None:
    """Two pools of as many workers as the configuration allows, each with what can be said of one."""
    most = 1_000  # baton/config_load.py, _WORKERS
    reason = "its pod does not run after 900 s: 0/128 nodes are available: 128 Insufficient nvidia.com/gpu"
    members = [
        Member(f"{'f' * 40}-{role.name.lower()}-{n}", role, FAILED, reason, epoch=2**64 - 1)
        for role in (Role.PREFILL, Role.DECODE)
        for n in range(most)
    ]
    replaced = frozenset((member.worker_id, member.epoch) for member in members)
    with pytest.raises(ConfigError, match="between 0 and 1000"):
        load(None, {"BATON__PREFILL": str(most + 1)}, {})
    assert len(fleet_to_json(SavedFleet(tuple(members), replaced))) < 1 << 20
