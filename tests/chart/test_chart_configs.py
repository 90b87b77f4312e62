"""What the processes read is what the values say, and the project's own loader takes it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from baton.config import ClusterConfig, EngineConfig, KubernetesConfig, KVTransferConfig, RouterConfig, TracingConfig
from baton.config_load import from_json, load
from baton.peer_trust import PeerTrust
from baton.request import Role
from baton.slo import SLO
from router.controller import ray_head
from router.controller.admin_models import SLOClass
from router.controller.kube import prestop
from router.controller.ray_fleet import WorkerConfigs
from tests.chart.chart_rig import CHART, Release, merged, needs_helm, render
from tests.chart.chart_values import EVERYTHING, LEAST, MATRIX

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

pytestmark = needs_helm

NOT_BY_CHART = ("model", "tls_dir", "tracing")  # of a RouterConfig, which `load` derives from the cluster's


def cluster_of(release: Release, fullname: str = "demo-baton") -> ClusterConfig:
    return from_json(ClusterConfig, release.file(f"{fullname}-config", "cluster.json"))


def fullname(name: str) -> str:
    return "chat" if name == "another name" else "demo-baton"


@pytest.mark.parametrize("name", MATRIX)
def test_every_config_passes_the_loader_with_its_limits(name: str, tmp_path: Path) -> None:
    release = render(MATRIX[name])
    files = release.get("ConfigMap", f"{fullname(name)}-config")["data"]
    cluster = cluster_of(release, fullname(name))
    assert cluster.kubernetes.fullname == fullname(name)
    (tmp_path / "cluster.yaml").write_text(files["cluster.json"], encoding="utf-8")
    loaded = load(tmp_path / "cluster.yaml", {}, {}).config
    for file, text in files.items():
        if file == "cluster.json":
            continue
        router = from_json(RouterConfig, text)
        assert dataclasses.replace(router.model, path=loaded.model.path) == loaded.model
        assert router.tls_dir == loaded.router.tls_dir
        assert router.tracing == loaded.tracing == WorkerConfigs(loaded, "", lambda _: 1)("w", Role.DECODE).tracing
        assert router.batch.database == loaded.controller.database
        plain = {key: value for key, value in json.loads(text).items() if key not in NOT_BY_CHART}
        del plain["batch"]["database"]
        (tmp_path / "router.yaml").write_text(json.dumps({"router": plain}), encoding="utf-8")
        load(tmp_path / "router.yaml", {}, {})


def test_nothing_but_the_named_settings_is_left_to_the_code() -> None:
    """A setting that is added to these parts is either a value or listed here with its reason."""
    raw = json.loads(render(EVERYTHING).file("demo-baton-config", "cluster.json"))
    left: dict[str, tuple[type[DataclassInstance], set[str]]] = {
        "engine": (EngineConfig, {"speculation"}),  # there is none yet
        "kv": (
            KVTransferConfig,
            {"transport", "hello_timeout_s", "quiet_s", "max_resends"},
        ),  # nobody had to change them
        "tracing": (TracingConfig, set()),
        "kubernetes": (KubernetesConfig, {"api_server", "token_file", "ca_file"}),  # the pod's own
    }
    for part, (kind, names) in left.items():
        assert {field.name for field in dataclasses.fields(kind)} - raw[part].keys() == names, part


@pytest.mark.parametrize(("cpu", "cores"), [("8", 8), (8, 8), ("500m", 1), ("7500m", 7), ("2.5", 2), ("0.5", 1)])
def test_workers_compute_with_the_whole_cores_of_their_pods(cpu: object, cores: int) -> None:
    config = cluster_of(render(merged(LEAST, {"pools": {"decode": {"cpu": cpu}}})), "demo-baton").kubernetes
    assert (config.prefill_cores, config.decode_cores) == (8, cores)


def test_each_role_is_drained_for_as_long_as_its_pool_says() -> None:
    config = cluster_of(
        render(merged(LEAST, {"pools": {"decode": {"drainSeconds": 900}}, "router": {"drainSeconds": 30}}))
    )
    assert [config.drain_s_of(role) for role in ("prefill", "decode", "both")] == [60, 900, 900]
    assert config.router.drain_s == 30


def test_a_pool_of_both_has_its_own_bounds_and_hardware() -> None:
    both = {"cpu": "16", "replicas": {"initial": 3, "min": 2, "max": 5}}
    release = render(merged(MATRIX["colocated"], {"pools": {"both": both, "decode": {"cpu": "2"}}}))
    config = cluster_of(release, "demo-baton").kubernetes
    assert (config.both_min, config.both_max, config.both_cores) == (2, 5, 16)
    assert (config.prefill_min, config.decode_min) == (0, 0)
    assert config.prefill_shape == config.decode_shape == config.both_shape  # whatever the pools say that are off
    apart = cluster_of(render(LEAST), "demo-baton").kubernetes
    assert config.both_shape != apart.both_shape == apart.decode_shape


def test_each_process_of_a_router_pod_has_its_own_port_and_shares_the_public_ones() -> None:
    release = render(merged(LEAST, {"router": {"processes": 3}}))
    configs = [from_json(RouterConfig, release.file("demo-baton-config", f"router-{i}.json")) for i in range(3)]
    assert [config.process_port for config in configs] == [9100, 9101, 9102]
    assert {(config.http_port, config.grpc_port, config.shared_ports) for config in configs} == {(8000, 50051, True)}
    containers = release.get("Deployment", "demo-baton-router")["spec"]["template"]["spec"]["containers"]
    for config, container in zip(configs, containers, strict=True):
        assert container["readinessProbe"]["httpGet"] == {
            "path": "/readyz",
            "port": f"process-{config.process_port - 9100}",
        }
        assert {"containerPort": config.process_port} in [
            {"containerPort": p["containerPort"]} for p in container["ports"]
        ]


def test_rdma_reaches_ucx() -> None:
    kv = cluster_of(render(EVERYTHING)).kv
    assert (kv.ucx_net_devices, kv.require_rdma, kv.ucx["IB_ADDR_TYPE"]) == ("mlx5_0:1,mlx5_1:1", True, "ib_global")
    assert cluster_of(render(MATRIX["least"])).kv.ucx_net_devices == "all"


def test_the_url_of_a_database_is_in_no_config_map_and_everybody_who_needs_it_finds_it() -> None:
    release = render(MATRIX["batches of several routers"])
    router = from_json(RouterConfig, release.file("demo-baton-config", "router-0.json"))
    where = cluster_of(release).controller.database
    assert where == router.batch.database == "file:///etc/baton/database/url"
    for part in ("router", "controller"):
        spec = release.get("Deployment", f"demo-baton-{part}")["spec"]["template"]["spec"]
        [secret] = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "database"]
        assert (secret["secretName"], secret["items"]) == ("postgres", [{"key": "uri", "path": "url"}])
        mounts = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "database"]
        assert [f"file://{mount['mountPath']}/url" for mount in mounts] == [where]
    assert cluster_of(render(LEAST)).controller.database == ""


def test_workers_are_told_their_island_by_their_pods_and_routers_to_stay_in_it() -> None:
    required = render(EVERYTHING)
    assert cluster_of(required).kubernetes.fabric_label == "acme.example/island"
    assert from_json(RouterConfig, required.file("demo-baton-config", "router-0.json")).one_fabric
    near = render(MATRIX["near in the fabric"])
    assert cluster_of(near).kubernetes.fabric_label == "rack"
    assert not from_json(RouterConfig, near.file("demo-baton-config", "router-0.json")).one_fabric
    named = render(MATRIX["an island that is named otherwise"])
    assert cluster_of(named).kubernetes.fabric_label == "acme/island"


@pytest.mark.parametrize("scaler", ["slo", "none"])
def test_the_controller_is_told_who_decides_on_sizes(scaler: str) -> None:
    assert cluster_of(render(merged(LEAST, {"scaler": {"type": scaler}}))).kubernetes.scaler == scaler


def test_pools_of_equal_hardware_may_flip_and_others_may_not() -> None:
    alike = cluster_of(render(LEAST)).kubernetes
    assert alike.prefill_shape == alike.decode_shape
    other = cluster_of(render(merged(LEAST, {"pools": {"decode": {"memory": "128Gi"}}}))).kubernetes
    assert other.prefill_shape != other.decode_shape
    drain = cluster_of(render(merged(LEAST, {"pools": {"decode": {"replicas": {"max": 3}}}}))).kubernetes
    assert drain.prefill_shape == drain.decode_shape


def test_slo_classes_are_what_the_admin_endpoint_takes() -> None:
    classes = [
        {
            "name": "interactive",
            "ttftMs": 2000,
            "tpotMs": 100,
            "itlP99Ms": 300,
            "e2eMs": 9000,
            "weight": 2,
            "priority": 5,
        },
        {"name": "batch", "ttftMs": 60000, "tpotMs": 1000, "percentile": 0.9},
    ]
    seed: list[dict[str, Any]] = json.loads(
        render(merged(LEAST, {"slo": {"classes": classes}})).file("demo-baton-seed", "slo.json")
    )
    named = [SLOClass(**{k: v for k, v in one.items() if k != "name"}).named(one["name"]) for one in seed]
    assert named[0] == SLO("interactive", 2000.0, 100.0, 300.0, 9000.0, weight=2.0, priority=5)
    assert named[1].percentile == 0.9


def test_ray_is_started_with_the_environment_that_was_measured(tmp_path: Path) -> None:
    """What `baton up` gives, less what is for one machine only; the head's storage and hook are its own, and pods print."""
    ours = dict(ray_head.environ(tmp_path / "token", tmp_path))
    of_machine = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}
    of_head = {"RAY_gcs_storage", "RAY_gcs_storage_path", "RAY_START_HOOK"}
    for name in ("least", "kuberay"):
        for pod_name, pod in render(MATRIX[name]).pods():
            for container in pod["spec"]["containers"]:
                env = {item["name"]: item.get("value") for item in container.get("env", [])}
                prints = {key for key in env if key in ("RAY_LOG_TO_STDERR", "RAY_BACKEND_LOG_LEVEL")}
                assert len(prints) == (2 if container["name"] == "worker" else 0), "what a worker says is its pod's log"
                theirs = {key for key in env if key.startswith("RAY_")} - prints
                if not theirs:
                    continue
                is_head = container["name"] == "head"
                assert theirs == ours.keys() - of_machine - (set() if is_head else of_head), (
                    pod_name,
                    container["name"],
                )
                for key in theirs - {"RAY_AUTH_TOKEN_PATH", "RAY_gcs_storage_path"}:
                    assert env[key] == ours[key], key


@pytest.mark.parametrize("name", ["least", "redis", "kuberay"])
def test_ray_start_takes_the_flags_that_it_is_given(name: str) -> None:
    from ray.scripts.scripts import start  # seconds: for this alone

    num_commands = 0
    for _, pod in render(MATRIX[name]).pods():
        for container in pod["spec"]["containers"]:
            if (args := container.get("args", []))[:2] == ["ray", "start"]:
                with start.make_context("start", list(args[2:])) as context:
                    assert context.params["block"] is True
                num_commands += 1
    for cluster in render(MATRIX[name]).of_kind("RayCluster"):
        for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
            flags = {f"--{flag}" for flag in group["rayStartParams"]}
            assert flags <= {option for parameter in start.params for option in parameter.opts}
            num_commands += 1
    assert num_commands == 4


def test_a_head_with_redis_has_its_password_from_the_secret() -> None:
    (container,) = render(MATRIX["redis"]).get("StatefulSet", "demo-baton-head")["spec"]["template"]["spec"][
        "containers"
    ]
    env = {item["name"]: item for item in container["env"]}
    assert env["RAY_REDIS_ADDRESS"]["value"] == "r:6379"
    assert env["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"] == {"name": "r", "key": "password"}
    assert "--redis-password=$(REDIS_PASSWORD)" in container["args"]
    assert "RAY_gcs_storage" not in env


@pytest.mark.parametrize("tls", [False, True])
def test_a_pods_last_command_is_one_that_the_module_takes(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(control: str, worker_id: str, address: tuple[str, int], limit_s: float, trust: PeerTrust) -> None:
        said.append((control, worker_id, address[1], limit_s))

    said: list[tuple[str, str, int, float]] = []
    monkeypatch.setattr(prestop, "wait_until_drained", asked)
    monkeypatch.setattr("baton.clock.run", lambda result: "")
    monkeypatch.setattr(prestop, "PeerTrust", lambda folder, part: folders.append(folder))
    folders: list[str] = []
    pod = dict(render(EVERYTHING if tls else LEAST).workers())["decode"]
    (shell, flag, script) = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("sh", "-c")
    words = script.replace('"$POD_NAME"', "demo-baton-decode-0").split()
    assert words[:4] == ["exec", "python", "-m", "router.controller.kube.prestop"]
    assert prestop.main(words[4:]) == 0
    assert said == [("demo-baton-controller:7001", "demo-baton-decode-0", 7100, 600.0)]
    assert folders == ["/etc/baton/tls/worker" if tls else ""]


def test_the_defaults_of_routers_are_the_codes_own() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    ours, code = from_json(RouterConfig, render(LEAST).file("demo-baton-config", "router-0.json")), RouterConfig()
    names = [field.name for field in dataclasses.fields(RouterConfig)]
    differ = {name for name in names if getattr(ours, name) != getattr(code, name)}
    assert differ <= {"host", "control_address", "process_port", "model", "batch", "cost"}
    assert values["router"]["settings"]


def test_routers_of_emulated_gpus_go_by_the_clock_of_the_rest() -> None:
    release = render(merged(MATRIX["emulated"], {"emulation": {"timeScale": 5}}))
    router = from_json(RouterConfig, release.file("demo-baton-config", "router-0.json"))
    assert (router.time_scale, cluster_of(release).emulation.time_scale) == (5.0, 5.0)
    real = render(merged(LEAST, {"emulation": {"timeScale": 5}}))
    assert from_json(RouterConfig, real.file("demo-baton-config", "router-0.json")).time_scale == 1.0
