"""Looks after the cluster beside the fleet: finds conditions, tells operators, and evicts pods whose workers are sick.

A sick worker is one that is away for `sick_s` on a pod that runs, while starting it again did not help: its pod is evicted, by
name and as disruption budgets allow, and comes back under the same name. One at a time, and only while others serve: where
nobody does, it is not the pod. A pod that was evicted and is sick again waits twice as long. Event loop only."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton import clock
from baton.errors import BatonError
from baton.log import get_log
from router.controller.controller import Controller
from router.controller.fleet_state import FAILED, READY, Member
from router.controller.kube.api import KubeApi
from router.controller.kube.calls import KubeCalls
from router.controller.kube.conditions import Short, Symptoms, conditions, is_node_lost
from router.controller.kube.errors import Conflict
from router.controller.kube.homes import Homes
from router.controller.kube.objects import Happened, Pod
from router.controller.kube.pods import PodTable
from router.controller.kube.status import Conditions
from router.controller.ray_actors import RayActors

log = get_log("controller.kube.care")

HEAD_S = 10.0  # between two questions to Ray's head
EVENTS_S = 10.0  # between two looks at events of a set that has too few pods
SHORT_S = 10.0  # a set's pods are made within a second


class Care:
    def __init__(
        self,
        controller: Controller,
        homes: Homes,
        pods: PodTable,
        actors: RayActors,
        api: KubeApi,
        calls: KubeCalls,
        told: Conditions,
        leads: Callable[[], bool],
        sick_s: float,
        now_s: Callable[[], float] = clock.now_s,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        """`now_unix_s`: as the API server's dates go."""
        self._controller = controller
        self._homes = homes
        self._pods = pods
        self._actors = actors
        self._api = api
        self._calls = calls
        self._told = told
        self._leads = leads
        self._sick_s = sick_s
        self._now_s = now_s
        self._now_unix_s = now_unix_s
        self._sick_since_s: dict[str, float] = {}
        self._num_evicted: dict[str, int] = {}
        self._short_since_s: dict[str, float] = {}
        self._events: dict[str, tuple[float, list[Happened]]] = {}  # by set: when they were read, and what they say
        self._head = (float("-inf"), "")  # when it was asked, and why it does not answer

    async def look(self, upgrade_paused: str) -> None:
        """`upgrade_paused`: why; "" = it is not."""
        await self._ask_head()
        symptoms = Symptoms(
            pods=self._pods.by_name(),
            members=self._controller.fleet.members(),
            now_unix_s=self._now_unix_s(),
            short=await self._short(),
            api_silence_s=self._api.client.counts.age_s,
            head_away=self._head[1],
            over_budget=self._homes.over_budget(),
            upgrade_paused=upgrade_paused,
        )
        await self._told.see(conditions(symptoms))
        if (pod := self._sick()) is not None:
            await self._evict(pod)

    async def _ask_head(self) -> None:
        asked_s, why = self._head
        if self._now_s() - asked_s < HEAD_S:
            return
        try:
            await self._actors.num_places()
            why = ""
        except BatonError as error:
            why = f"Ray's head does not answer: {error.message}"
        self._head = (self._now_s(), why)

    async def _short(self) -> list[Short]:
        """Sets that have had fewer pods than they should for SHORT_S, and what is said about them."""
        pods, found, now_s = self._pods.by_name(), [], self._now_s()
        for home, known in self._homes.known().items():
            missing = [name for name in known.names if name not in pods]
            if not missing or not self._pods.is_known:
                self._short_since_s.pop(home, None)
            elif now_s - self._short_since_s.setdefault(home, now_s) >= SHORT_S:
                name = self._homes.items()[home].pods.name
                found.append(Short(name, len(missing), await self._events_about(name)))
        return found

    async def _events_about(self, name: str) -> list[Happened]:
        read_s, events = self._events.get(name, (float("-inf"), []))
        if self._now_s() - read_s >= EVENTS_S:
            try:
                events = await self._calls.run(lambda: self._api.events_about(name))
            except BatonError as error:
                log.warning("events_unknown", set=name, reason=error.message)
            self._events[name] = (self._now_s(), events)
        return events

    # -- sick pods ---------------------------------------------------------------------------------------------------

    def _sick(self) -> Pod | None:
        """Whose turn it is to be evicted."""
        members, pods, now_s = self._controller.fleet.members(), self._pods.by_name(), self._now_s()
        sick = {m.worker_id: pods[m.worker_id] for m in members if self._is_sick(m, pods.get(m.worker_id))}
        for name in self._sick_since_s.keys() - sick.keys():
            del self._sick_since_s[name]
        for member in members:
            if member.state == READY:
                self._num_evicted.pop(member.worker_id, None)
        somebody_serves = any(member.state == READY for member in members)
        is_quiet = not any(pod.is_terminating and not is_node_lost(pod) for pod in pods.values())  # those may never end
        for name, pod in sick.items():
            for_s = now_s - self._sick_since_s.setdefault(name, now_s)
            patience_s = self._sick_s * 2 ** self._num_evicted.get(name, 0)
            if for_s >= patience_s and somebody_serves and is_quiet and not self._head[1]:
                return pod
        return None

    def _is_sick(self, member: Member, pod: Pod | None) -> bool:
        return member.state == FAILED and pod is not None and pod.runs and member.stays

    async def _evict(self, pod: Pod) -> None:
        if not self._leads():
            return
        log.warning("pod_evicted", pod=pod.name, reason=self._controller.fleet.get(pod.name).reason)
        try:
            await self._calls.run(lambda: self._api.evict(pod))
        except Conflict:
            return  # another pod has that name by now
        except BatonError as error:
            log.warning("eviction_refused", pod=pod.name, reason=error.message)
            return
        self._num_evicted[pod.name] = self._num_evicted.get(pod.name, 0) + 1
        self._sick_since_s.pop(pod.name, None)
