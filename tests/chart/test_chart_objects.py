"""Objects fit together: selectors and pods, who owns which field, who may do what, who may reach whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from baton.config import ClusterConfig
from baton.config_load import from_json
from tests.chart.chart_rig import Manifest, Release, merged, needs_helm, render
from tests.chart.chart_values import EVERYTHING, LEAST, MATRIX, STILL
from tests.chart.kube_schemas import FOREIGN, VERSIONS, faults, upstream

pytestmark = needs_helm

BY_PART = {"head", "prefill", "decode", "both", "router", "controller"}


def selectors(release: Release) -> Iterator[tuple[str, dict[str, str], str]]:
    """(object, labels asked for, whose pods they are for)."""
    for manifest in release.manifests:
        kind, name, spec = manifest["kind"], manifest["metadata"]["name"], manifest.get("spec", {})
        selector = spec.get("selector")
        if kind == "Service":
            yield f"{kind}/{name}", selector, name
        elif kind in ("StatefulSet", "Deployment", "PodDisruptionBudget"):
            yield f"{kind}/{name}", selector["matchLabels"], name
        elif kind == "NetworkPolicy":
            yield f"{kind}/{name}", spec["podSelector"]["matchLabels"], name


def part_of(release_name: str, name: str) -> str:
    rest = name.removeprefix(release_name).strip("-").split("-")
    return rest[0] if rest[0] in BY_PART | {"worker"} else ""


def matches(selector: dict[str, str], pod: Manifest) -> bool:
    labels: dict[str, str] = pod["metadata"]["labels"]
    if "baton.dev/controller" in labels:
        labels = labels | {"baton.dev/leads": "true"}  # as the leader's pod, of which the Service of controllers is
    return selector.items() <= labels.items()


@pytest.mark.parametrize("name", MATRIX)
def test_an_api_server_would_take_every_object(name: str) -> None:
    for manifest in render(MATRIX[name]).manifests:
        if (theirs := upstream().get(manifest["kind"])) is not None:
            assert not [error.message for error in theirs.iter_errors(manifest)]
        if manifest["kind"] in FOREIGN and manifest["kind"] != "RayCluster":
            continue
        for version in VERSIONS:
            if name == "claims of devices" and version < "1.32":
                continue
            assert not list(faults(manifest, version)), version


@pytest.mark.parametrize(
    "values",
    [
        LEAST,
        merged(LEAST, {"commonLabels": {"team": "a", "app": "b"}}),
        merged(LEAST, {"nameOverride": "llm"}),
        MATRIX["colocated"],
        EVERYTHING,
    ],
    ids=["plain", "labels of the user", "another name", "colocated", "everything"],
)
def test_of_two_releases_in_one_namespace_each_selector_matches_exactly_its_pods(values: dict[str, Any]) -> None:
    releases = {name: render(values, name) for name in ("a", "b")}
    pods = {(name, pod_name): pod for name, release in releases.items() for pod_name, pod in release.pods()}
    num_asked = 0
    for name, release in releases.items():
        full = release.of_kind("Lease")[0]["metadata"]["name"].removesuffix("-controller")
        for owner, selector, object_name in selectors(release):
            found = {(of, pod.split("/")[1]) for (of, pod), manifest in pods.items() if matches(selector, manifest)}
            part = part_of(full, object_name)
            homes = {role for role, pod in release.workers()} if part == "worker" else {part}
            assert found == {(name, f"{full}-{home}") for home in homes}, owner
            num_asked += 1
    assert num_asked >= 20


def test_controllers_that_wait_are_ready_so_that_a_rollout_ends() -> None:
    release = render(LEAST)
    spec = release.get("Deployment", "demo-baton-controller")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["type"] == "RollingUpdate"
    (container,) = (one for one in spec["template"]["spec"]["containers"] if one["name"] == "controller")
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"
    assert release.get("PodDisruptionBudget", "demo-baton-controller")["spec"]["maxUnavailable"] == 1


ROUTERS_FETCH: dict[
    str, tuple[list[str], str]
] = {  # what a router's pod does first, and where its processes find the model
    "least": (["fetch", "--small"], "/models/small/acme--tiny-main"),
    "host path": (["fetch", "--small"], "/models/small/acme--tiny-main"),
    "a url": (["fetch"], f"/models/acme--tiny-{'0' * 12}.gguf"),  # its sha256 is that of the whole file
    "a claim that others fill": (["wait"], "/models/acme--tiny-main"),
    "a claim with the model": ([], "/models/tiny.gguf"),
}


@pytest.mark.parametrize("name", ROUTERS_FETCH)
def test_routers_fetch_no_weights_that_they_can_do_without_and_write_nothing(name: str) -> None:
    verbs, path = ROUTERS_FETCH[name]
    release = render(MATRIX[name])
    spec = release.get("Deployment", "demo-baton-router")["spec"]["template"]["spec"]
    fetches = [container["args"] for container in spec.get("initContainers", [])]
    assert [[args[2], *("--small",) * ("--small" in args)] for args in fetches] == ([verbs] if verbs else [])
    assert [args[3] for args in fetches] == ([path] if verbs else [])
    assert json.loads(release.file("demo-baton-config", "router-0.json"))["model"]["path"] == path
    for container in spec["containers"]:
        (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "model")
        assert mount["readOnly"]
    for _, pod in release.workers():
        assert all("--small" not in container["args"] for container in pod["spec"].get("initContainers", []))


def test_no_selector_asks_for_the_live_role() -> None:
    for _, selector, _ in selectors(render(EVERYTHING)):
        assert not selector.keys() & {"baton.dev/role", "llm-d.ai/role", "app.kubernetes.io/version", "team"}


@pytest.mark.parametrize("name", MATRIX)
def test_sizes_are_absent_where_a_scaler_owns_them_on_install_and_upgrade(name: str) -> None:
    owned = MATRIX[name].get("scaler", {}).get("type", "slo") != "none"
    upgrades = [("--is-upgrade",)] if name in ("least", "hpa", "kuberay", "fixed sizes") else []
    for flags in ((), *upgrades):
        release = render(MATRIX[name], "demo", *flags)
        for manifest in release.of_kind("StatefulSet"):
            is_head = manifest["metadata"]["name"].endswith("-head")
            assert ("replicas" in manifest["spec"]) is (is_head or not owned)
        for manifest in release.of_kind("RayCluster"):
            assert not any("replicas" in group for group in manifest["spec"]["workerGroupSpecs"])
        for manifest in release.of_kind("HorizontalPodAutoscaler"):
            target = manifest["spec"]["scaleTargetRef"]
            assert "replicas" not in release.get(target["kind"], target["name"])["spec"]


@pytest.mark.parametrize("flags", [(), ("--is-upgrade",)], ids=["install", "upgrade"])
def test_state_of_the_controller_is_rendered_without_content(flags: tuple[str, ...]) -> None:
    release = render(EVERYTHING, "demo", *flags)
    for kind, name in (("ConfigMap", "slo"), ("ConfigMap", "fleet"), ("Lease", "controller")):
        assert release.get(kind, f"demo-baton-{name}").keys() == {"apiVersion", "kind", "metadata"}
    kept = release.get("ConfigMap", "demo-baton-slo")["metadata"]["annotations"]
    assert kept["helm.sh/resource-policy"] == "keep"


@pytest.mark.parametrize("name", [n for n in MATRIX if n not in ("external", "another name")])
def test_the_grace_period_exceeds_the_drain(name: str) -> None:
    release = render(MATRIX[name])
    cluster = from_json(ClusterConfig, release.file("demo-baton-config", "cluster.json"))
    for role, pod in release.workers():
        (container,) = pod["spec"]["containers"]
        script = container["lifecycle"]["preStop"]["exec"]["command"][-1].split()
        drain_s = int(script[script.index("--limit-s") + 1])
        assert pod["spec"]["terminationGracePeriodSeconds"] > drain_s, role
        assert script[script.index("--worker") + 1] == '"$POD_NAME"'
    router = release.get("Deployment", "demo-baton-router")["spec"]["template"]["spec"]
    assert router["terminationGracePeriodSeconds"] > cluster.router.drain_s + 5  # the pause before SIGTERM


RULES = {
    ("apps", "statefulsets"): ({"get"}, {"demo-baton-prefill", "demo-baton-decode"}),
    ("apps", "statefulsets/scale"): ({"get", "update"}, {"demo-baton-prefill", "demo-baton-decode"}),
    ("", "pods"): ({"list", "watch", "patch"}, set()),
    ("", "pods/eviction"): ({"create"}, set()),
    ("", "configmaps"): ({"get", "update"}, {"demo-baton-slo", "demo-baton-fleet"}),
    ("", "events"): ({"create", "list"}, set()),
    ("coordination.k8s.io", "leases"): ({"get", "update"}, {"demo-baton-controller"}),
}  # docs/kubernetes.md


def granted(release: Release) -> dict[tuple[str, str], tuple[set[str], set[str]]]:
    rules = release.get("Role", "demo-baton-controller")["rules"]
    return {
        (rule["apiGroups"][0], rule["resources"][0]): (set(rule["verbs"]), set(rule.get("resourceNames", ())))
        for rule in rules
    }


def test_the_controller_may_do_what_it_does_and_no_more() -> None:
    assert granted(render(LEAST)) == RULES
    kuberay = {key: rule for key, rule in RULES.items() if key[0] != "apps"}
    kuberay["ray.io", "rayclusters"] = ({"get", "patch"}, {"demo-baton"})
    assert granted(render(MATRIX["kuberay"])) == kuberay
    for name in MATRIX:
        assert not {"ClusterRole", "ClusterRoleBinding"} & {m["kind"] for m in render(MATRIX[name]).manifests}


def test_the_objects_that_a_role_names_exist() -> None:
    release = render(LEAST)
    for (_, resource), (_, names) in granted(release).items():
        kind = {"configmaps": "ConfigMap", "leases": "Lease"}.get(resource, "StatefulSet")
        assert all(release.has(kind, name) for name in names)


def test_the_head_has_an_address_that_outlives_its_pod() -> None:
    service = render(LEAST).get("Service", "demo-baton-head")["spec"]
    assert "clusterIP" not in service
    assert service["ports"] == [{"name": "gcs", "port": 6379, "targetPort": "gcs"}]


def test_only_the_controller_has_a_token_of_the_api_server() -> None:
    assert render(EVERYTHING).get("ServiceAccount", "demo-baton")["automountServiceAccountToken"] is False
    for name, pod in render(EVERYTHING).pods():
        mounts = pod["spec"]["automountServiceAccountToken"]
        assert mounts is (name == "Deployment/demo-baton-controller"), name


@pytest.mark.parametrize("name", MATRIX)
def test_pods_run_as_nobody_and_lock_memory_only_for_rdma(name: str) -> None:
    for pod_name, pod in render(MATRIX[name]).pods():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True, pod_name
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["spec"]["containers"] + pod["spec"].get("initContainers", []):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            has_rdma = any(key.startswith("rdma/") for key in container["resources"]["limits"])
            assert context["capabilities"].get("add", []) == (["IPC_LOCK"] if has_rdma else [])


def test_the_admin_port_is_on_no_ingress_route_or_router_service() -> None:
    release = render(EVERYTHING)
    for manifest in release.of_kind("Ingress") + release.of_kind("HTTPRoute") + release.of_kind("GRPCRoute"):
        text = json.dumps(manifest)
        assert "8001" not in text
        assert "controller" not in text
        assert "demo-baton-router" in text
    ports = release.get("Service", "demo-baton-router")["spec"]["ports"]
    assert {port["name"] for port in ports} == {"http", "grpc"}
    assert all(
        path["path"] == "/v1"
        for rule in release.of_kind("Ingress")[0]["spec"]["rules"]
        for path in rule["http"]["paths"]
    )


def test_who_may_reach_whom() -> None:
    """By default workers are reached by workers, controller, head and, at their port, routers; nobody else is named."""
    release = render(LEAST)
    peers: dict[str, list[tuple[set[str], list[Any]]]] = {}
    for policy in release.of_kind("NetworkPolicy"):
        part = policy["metadata"]["name"].removeprefix("demo-baton-")
        peers[part] = [
            (
                {p["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for p in rule.get("from", [])},
                [port["port"] for port in rule.get("ports", [])],
            )
            for rule in policy["spec"]["ingress"]
        ]
    assert peers["head"] == [({"worker", "controller"}, [])]
    assert peers["worker"] == [({"worker", "controller", "head"}, []), ({"router"}, ["worker"])]
    assert peers["controller"] == [
        ({"worker", "router"}, ["control"]),
        ({"worker", "head"}, [6380, 10002]),
        ({"test"}, ["admin"]),
    ]
    assert peers["router"] == [(set(), ["http", "grpc"])]


def test_pods_and_a_head_of_somebody_else_reach_the_controller() -> None:
    release = render(MATRIX["external"])
    (policy,) = (p for p in release.of_kind("NetworkPolicy") if p["metadata"]["name"].endswith("-controller"))
    control, ray, _ = policy["spec"]["ingress"]
    theirs = {"podSelector": {"matchLabels": {"baton.dev/fleet": "demo-baton"}}}  # what docs/kubernetes.md asks of them
    head = {"podSelector": {"matchLabels": {"ray.io/node-type": "head"}}}
    assert (control["ports"][0]["port"], theirs in control["from"]) == ("control", True)
    assert (ray["ports"][0]["port"], theirs in ray["from"], head in ray["from"]) == (6380, True, True)


@pytest.mark.parametrize("tls", [{"secret": ""}, {"secret": "grpc-tls"}, {"secret": "grpc-tls", "clientCa": True}])
def test_the_port_of_grpc_is_said_and_tried_as_it_is(tls: dict[str, Any]) -> None:
    release = render(merged(LEAST, {"router": {"tls": tls}}))
    (port,) = (p for p in release.get("Service", "demo-baton-router")["spec"]["ports"] if p["name"] == "grpc")
    assert port.get("appProtocol") == (None if tls["secret"] else "kubernetes.io/h2c")
    assert release.has("Pod", "demo-baton-test-grpc") is not bool(tls.get("clientCa"))  # it could show no certificate
    for pod in release.of_kind("Pod"):
        secrets = [volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume]
        assert all(secret.get("optional") for secret in secrets)  # a public certificate has no ca.crt beside it


def test_both_pools_stay_in_one_island_of_the_fabric() -> None:
    required = {
        json.dumps(pod["spec"]["affinity"]["podAffinity"], sort_keys=True) for _, pod in render(EVERYTHING).workers()
    }
    (affinity,) = map(json.loads, required)
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "acme.example/island"
    assert all(matches(term["labelSelector"]["matchLabels"], pod) for _, pod in render(EVERYTHING).workers())
    near = [pod["spec"]["affinity"]["podAffinity"] for _, pod in render(MATRIX["near in the fabric"]).workers()]
    assert all("preferredDuringSchedulingIgnoredDuringExecution" in affinity for affinity in near)


def test_what_the_user_asks_of_placement_stays_beside_the_fabric() -> None:
    mine: dict[str, Any] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}}
    }
    values = merged(EVERYTHING, {"pools": {"decode": {"affinity": mine}}})
    affinity = dict(render(values).workers())["decode"]["spec"]["affinity"]
    assert affinity.keys() == {"nodeAffinity", "podAffinity"}


@pytest.mark.parametrize(("name", "when"), [("everything", "required"), ("near in the fabric", "preferred")])
def test_a_pod_affinity_of_the_user_s_is_kept_beside_the_fabric_s(name: str, when: str) -> None:
    rule = f"{when}DuringSchedulingIgnoredDuringExecution"
    term = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "cache"}}}
    mine = term if when == "required" else {"weight": 7, "podAffinityTerm": term}
    release = render(merged(MATRIX[name], {"pools": {"decode": {"affinity": {"podAffinity": {rule: [mine]}}}}}))
    for home, pod in release.workers():
        terms = pod["spec"]["affinity"]["podAffinity"][rule]
        assert (mine in terms, len(terms)) == ((True, 2) if home == "decode" else (False, 1))


def test_a_claim_of_devices_takes_the_place_of_the_resource() -> None:
    for _, pod in render(MATRIX["claims of devices"]).workers():
        assert pod["spec"]["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "h100"}]
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["claims"] == [{"name": "gpu"}]
        assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_pods_under_kuberay_are_those_of_the_sets() -> None:
    """But for what KubeRay does itself: the command, and a liveness probe where it would add its own."""
    sets, groups = dict(render(EVERYTHING).workers()), dict(render(MATRIX["everything under kuberay"]).workers())
    for role in ("prefill", "decode"):
        ours, theirs = sets[role]["spec"]["containers"][0], groups[role]["spec"]["containers"][0]
        assert ours.keys() - theirs.keys() == {"args"}
        assert theirs.keys() - ours.keys() == {"livenessProbe"}
        assert {k: v for k, v in ours.items() if k in theirs} == {k: v for k, v in theirs.items() if k in ours}
        assert sets[role]["metadata"]["labels"] == groups[role]["metadata"]["labels"]


def test_a_pod_is_told_to_ray_by_its_own_name() -> None:
    for _, pod in render(LEAST).workers():
        assert '--resources={"pod:$(POD_NAME)": 1}' in pod["spec"]["containers"][0]["args"]
    for manifest in render(MATRIX["kuberay"]).of_kind("RayCluster"):
        for group in manifest["spec"]["workerGroupSpecs"]:
            assert group["rayStartParams"]["resources"] == r'"{\"pod:$POD_NAME\": 1}"'


@pytest.mark.parametrize("name", [n for n in MATRIX if n not in ("external", "another name")])
def test_everything_that_a_pod_mounts_is_there_and_all_that_is_mounted_has_a_place(name: str) -> None:
    release = render(MATRIX[name])
    for pod_name, pod in release.pods():
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        containers = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
        mounted = {mount["name"] for container in containers for mount in container.get("volumeMounts", [])}
        own = {"gcs"} if pod_name == "StatefulSet/demo-baton-head" and "gcs" not in volumes else set()
        assert mounted - own == volumes.keys(), pod_name
        for volume in volumes.values():
            if "configMap" in volume:
                assert release.has("ConfigMap", volume["configMap"]["name"])


def test_no_pod_is_replaced_for_a_new_version_of_the_chart_alone() -> None:
    for name, pod in render(EVERYTHING).pods():
        if not name.startswith("Pod/"):
            assert not pod["metadata"]["labels"].keys() & {"helm.sh/chart", "app.kubernetes.io/version"}, name


def test_pods_are_replaced_when_what_they_read_at_start_changes() -> None:
    def marks(values: dict[str, Any]) -> dict[str, str]:
        pods = render(merged(LEAST, values)).pods()
        return {
            name: mark for name, pod in pods if (mark := pod["metadata"].get("annotations", {}).get("baton.dev/config"))
        }

    before = marks({})
    engine = marks({"engine": {"maxNumSeqs": 8}})
    sets = {f"StatefulSet/demo-baton-{role}" for role in ("prefill", "decode")}
    assert sets <= {name for name in before if before[name] != engine[name]}
    mode = marks({"scaler": {"mode": "auto"}})
    assert {name for name in before if before[name] != mode[name]} == {"Deployment/demo-baton-controller"}


@pytest.mark.parametrize("name", ["everything", "everything under kuberay"])
def test_whoever_traces_has_the_files_that_its_configuration_names_and_says_who_it_is(name: str) -> None:
    release = render(MATRIX[name])
    config = json.loads(release.file("demo-baton-config", "router-0.json"))["tracing"]
    assert json.loads(release.file("demo-baton-config", "cluster.json"))["tracing"] == config
    named = {str(value) for key, value in config.items() if key.endswith("_file")}
    assert len(named) == 4
    pods = [release.get("Deployment", "demo-baton-router")["spec"]["template"], *(pod for _, pod in release.workers())]
    assert len(pods) == 3
    for pod in pods:
        [volume] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "tracing"]
        paths = {item["path"] for source in volume["projected"]["sources"] for item in source["secret"]["items"]}
        for container in pod["spec"]["containers"]:
            [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "tracing"]
            assert {f"{mount['mountPath']}/{path}" for path in paths} == named
            names = [entry["name"] for entry in container["env"]]
            assert names.index("OTEL_RESOURCE_ATTRIBUTES") > max(names.index("POD_NAME"), names.index("POD_UID"))


def test_where_nothing_is_traced_nothing_speaks_of_it_and_pods_stay_as_they_were() -> None:
    text = render(LEAST).text
    assert "OTEL" not in text
    assert "tracing" not in text
    off = merged(LEAST, {"tracing": {"enabled": False, "endpoint": "http://otel:4317", "sampleRatio": 1}})
    assert render(merged(STILL, off)).text == render(STILL).text


def test_pods_are_others_once_what_they_trace_is() -> None:
    tracing = {"tracing": {"enabled": True, "endpoint": "http://otel:4317"}}
    releases = [
        render(merged(STILL, *parts)) for parts in ((), (tracing,), (tracing, {"tracing": {"sampleRatio": 0.5}}))
    ]
    for part in ("worker", "router"):
        assert (
            len({str(_pod(release, part)["metadata"]["annotations"]["baton.dev/config"]) for release in releases}) == 3
        )


def _pod(release: Release, part: str) -> Manifest:
    kind, name = ("StatefulSet", "decode") if part == "worker" else ("Deployment", "router")
    template: Manifest = release.get(kind, f"demo-baton-{name}")["spec"]["template"]
    return template


def test_a_controller_sees_the_processes_of_its_ray_node() -> None:
    """Ray's driver looks for a raylet among the processes, and where it sees none it never connects."""
    for name in ("least", "kuberay", "everything"):
        release = render(MATRIX[name])
        pod = next(pod for _, pod in release.pods() if "baton.dev/controller" in pod["metadata"]["labels"])
        assert {container["name"] for container in pod["spec"]["containers"]} == {"controller", "ray-node"}
        assert pod["spec"]["shareProcessNamespace"] is True
