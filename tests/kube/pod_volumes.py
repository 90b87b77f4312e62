"""The volumes of a pod as folders of this machine, so that its containers can mount them where the chart says.

emptyDirs are the pod's own and outlive its containers; claims are their own and outlive pods; ConfigMaps, Secrets and the token
of the service account are written down as they are when a container starts. Sizes are not bounded, and a volume in memory is on
disk.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kube.fake_api_resources import Json, at
from tests.kube.fake_api_verbs import Verbs
from tests.kube.fake_kubelet_env import CONFIG_MAPS, SECRETS
from tests.kube.pod_init import Mount

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, slots=True)
class Volumes:
    """Of all pods of one cluster. `token_of`: of a service account, by namespace and name."""

    folder: Path
    verbs: Verbs
    token_of: Callable[[str, str], str]

    def claim(self, name: str) -> Path:
        """The folder behind a PersistentVolumeClaim."""
        return self._made(self.folder / "claims" / name)

    def mounts(self, pod: Json, container: Json) -> Iterator[Mount]:
        owner = at(pod, ("spec", "securityContext", "fsGroup"), 0)
        for mount in container.get("volumeMounts", ()):
            source, is_written = self._source(pod, mount["name"])
            _give(source, owner, again=is_written)
            yield Mount(mount["mountPath"], str(source), bool(mount.get("readOnly", False)))
        if pod["spec"].get("automountServiceAccountToken", True):
            account = self._own(pod, "service-account")
            namespace = pod["metadata"]["namespace"]
            (account / "token").write_text(self.token_of(namespace, pod["spec"].get("serviceAccountName", "default")))
            (account / "namespace").write_text(namespace)
            _give(account, owner, again=True)
            yield Mount(ACCOUNT, str(account), read_only=True)

    def _source(self, pod: Json, name: str) -> tuple[Path, bool]:
        """The folder, and whether what is in it was written just now."""
        named = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        match named.get(name):
            case None:  # of the set's volumeClaimTemplates
                return self.claim(f"{name}-{pod['metadata']['name']}"), False
            case {"persistentVolumeClaim": {"claimName": claim}}:
                return self.claim(claim), False
            case {"emptyDir": _}:
                return self._own(pod, name), False
            case {"configMap": {"name": config_map}}:
                data = self.verbs.get(CONFIG_MAPS, pod["metadata"]["namespace"], config_map)["data"]
                return self._written(pod, name, {key: text.encode() for key, text in data.items()}), True
            case {"secret": secret}:
                return self._written(pod, name, self._secret(pod, secret)), True
            case other:
                raise ValueError(f"{other} is not supported here")

    def _secret(self, pod: Json, volume: Json) -> dict[str, bytes]:
        found = self.verbs.find(SECRETS, pod["metadata"]["namespace"], volume["secretName"])
        if found is None:
            assert volume.get("optional"), f"there is no Secret {volume['secretName']}"
            return {}
        data = {key: base64.b64decode(text) for key, text in (found.get("data") or {}).items()}
        data |= {key: text.encode() for key, text in (found.get("stringData") or {}).items()}
        items = volume.get("items") or [{"key": key, "path": key} for key in data]
        return {item["path"]: data[item["key"]] for item in items}

    def _written(self, pod: Json, name: str, files: dict[str, bytes]) -> Path:
        folder = self._own(pod, name)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        return folder

    def _own(self, pod: Json, name: str) -> Path:
        return self._made(self.folder / "pods" / pod["metadata"]["uid"] / name)

    def _made(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _give(folder: Path, group: int, *, again: bool) -> None:
    """As fsGroup does with OnRootMismatch: the group may read and write what is there. `again`: whatever was given before."""
    if folder.stat().st_gid == group and not again:
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, -1, group)
        path.chmod(0o2770 if path.is_dir() else 0o660)
