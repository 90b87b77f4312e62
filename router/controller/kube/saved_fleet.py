"""The fleet as the controller last knew it, in a ConfigMap: the next leader, on whatever node, goes on from there.

The same store as fleet_store.FleetStore. One leader writes it, compare-and-swap all the same: a leader that lost its lease a
moment ago and is still writing must not undo what its successor wrote, so each write names the version that this process last
read or wrote. Where that has changed, and what it wrote still stands there, somebody changed something else, such as a label.
Blocks.
"""

from __future__ import annotations

from baton.errors import BatonError, ConfigError
from router.controller.fleet_state import SavedFleet
from router.controller.fleet_store import fleet_from_json, fleet_to_json
from router.controller.kube.api import KubeApi
from router.controller.kube.errors import Conflict
from router.controller.kube.objects import Stored

_KEY = "fleet.json"


class ConfigMapFleet:
    """Of one process that leads."""

    def __init__(self, api: KubeApi, name: str) -> None:
        self._api = api
        self._name = name
        self._read: Stored | None = None

    def load(self) -> SavedFleet:
        """Nothing where nothing was saved. Raises: ConfigError: it cannot be read, or not be understood."""
        try:
            self._read = self._api.config_map(self._name)
            text = self._read.data.get(_KEY)
            return fleet_from_json(text) if text else SavedFleet()
        except (BatonError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"cannot read the fleet in ConfigMap {self._name}: {error}; `helm upgrade` renders one that is missing",
                field="kubernetes.fullname",
            ) from error

    def save(self, fleet: SavedFleet) -> None:
        """Raises: OSError, as a file would: it is not written, and the caller tries again."""
        try:
            try:
                self._put(fleet)
            except Conflict:
                self._read_again()
                self._put(fleet)
        except Conflict as error:
            raise ConnectionError(f"ConfigMap {self._name} changes faster than it can be written") from error
        except BatonError as error:
            raise ConnectionError(f"ConfigMap {self._name}: {error.message}") from error

    def _put(self, fleet: SavedFleet) -> None:
        assert self._read is not None, "it was loaded before"
        self._read = self._api.put_config_map(self._name, self._read, {_KEY: fleet_to_json(fleet)})

    def _read_again(self) -> None:
        """Raises: ConnectionError: another controller wrote it."""
        assert self._read is not None, "it was loaded before"
        found = self._api.config_map(self._name)
        if found.data.get(_KEY) != self._read.data.get(_KEY):
            raise ConnectionError(f"the fleet in ConfigMap {self._name} was written by another controller")
        self._read = found
