"""Services of the fake API server: addresses of this machine that lead to the pods that a Service selects, TCP alone.

A connection goes to one of the pods that are Ready, or to any where the Service publishes those that are not; where there is none
it is closed at once. Connections are not moved: they end with their pod. Headless Services and those without a selector lead
nowhere. Event loop of a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_resources import PODS, Json, Resource, at, matches_labels
from tests.kube.fake_api_rules import is_ready

SERVICES = Resource("", "v1", "services", "Service")
CONNECT_S = 2.0
CHUNK_BYTES = 1 << 16

T = TypeVar("T")
Address = tuple[str, int]


class FakeServices:
    def __init__(self, api: FakeApi, namespace: str, new_ip: Callable[[], str]) -> None:
        """`new_ip`: an address that this machine has and nobody uses."""
        self._api = api
        self._namespace = namespace
        self._new_ip = new_ip
        self._ips: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="services")
        self._thread.start()

    def ip(self, name: str) -> str:
        return self._ips[name]

    def hosts(self) -> str:
        """Lines of /etc/hosts."""
        return "".join(f"{ip} {name} {name}.{self._namespace}.svc\n" for name, ip in self._ips.items())

    def serve_all(self) -> None:
        """Each Service that is there by now and has an address of its own."""
        for service in self._api.verbs.objects(SERVICES, self._namespace):
            spec = service["spec"]
            if spec.get("clusterIP") != "None" and spec.get("selector"):
                self.serve(service)

    def serve(self, service: Json) -> None:
        ip = self._ips[service["metadata"]["name"]] = self._new_ip()
        for port in service["spec"]["ports"]:
            self._listen(ip, port["port"], partial(self._target, service["spec"], port["targetPort"]))

    def forward(self, name: str, port: int, target: Address) -> None:
        """A name for what is no pod."""
        ip = self._ips[name] = self._new_ip()
        self._listen(ip, port, lambda: target)

    def close(self) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _target(self, spec: Json, port: int | str) -> Address | None:
        pods = [pod for pod in self._api.verbs.objects(PODS, self._namespace) if self._leads_to(spec, pod)]
        if not pods:
            return None
        pod = random.choice(pods)
        named = {p["name"]: p["containerPort"] for c in pod["spec"]["containers"] for p in c.get("ports", ())}
        return pod["status"]["podIP"], named[port] if isinstance(port, str) else port

    def _leads_to(self, spec: Json, pod: Json) -> bool:
        is_there = at(pod, ("status", "podIP")) and at(pod, ("status", "phase")) == "Running"
        selected = matches_labels({"matchLabels": spec["selector"]}, pod["metadata"].get("labels", {}))
        return bool(is_there and selected and (is_ready(pod) or spec.get("publishNotReadyAddresses")))

    def _listen(self, ip: str, port: int, target: Callable[[], Address | None]) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await _join(reader, writer, target())

        self._servers.append(self._call(asyncio.start_server(accept, ip, port)))

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Address | None) -> None:
    """Both ways, until either end is closed."""
    with contextlib.closing(writer), contextlib.suppress(OSError):
        if target is None:
            return
        async with asyncio.timeout(CONNECT_S):
            reader_there, writer_there = await asyncio.open_connection(*target)
        with contextlib.closing(writer_there):
            ways = [asyncio.create_task(_copy(*way)) for way in ((reader, writer_there), (reader_there, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
