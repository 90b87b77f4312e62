"""The worker pools as Ray actors: create, wait, kill. The only module under router/ that imports ray.

Actors are detached and named after their worker, and Ray restarts a dead one for ever, so neither the controller's death nor
a worker's takes the pool along. Nothing of a request passes here. Every wait has a deadline of its own, because Ray waits for
ever for a placement that cannot be. Methods block: call them from threads, never from the event loop.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from baton import clock
from baton.config import WorkerConfig
from baton.config_load import to_json
from baton.errors import ConfigError, WorkerLost
from worker.actor import RemoteWorker, WorkerActor

NAMESPACE = "baton"
_CONFIG_ERROR = f"{ConfigError.__module__}.{ConfigError.__name__}: "  # as tracebacks write it
_STOP_S = 3.0  # a worker that is asked to stop closes its server at once; then it is killed


@dataclass(frozen=True, slots=True)
class Placement:
    """What each worker asks of Ray."""

    num_cpus: float
    server: str  # "module:class" that the actor shell runs
    start_timeout_s: float
    log_dir: str  # a file per worker; "" = Ray's own
    num_gpus: float = 0.0
    own_node: str = ""  # each worker to the node that offers the resource <this><worker id>; "" = to any


class RayPools:
    """Connects as Ray's one driver. Create it off the main thread: ray.init takes over SIGTERM there.

    Raises:
        ConnectionError: Ray is away.
    """

    def __init__(self, ray_address: str, node_dir: str, placement: Placement) -> None:
        self._placement = placement
        self._ended: set[str] = set()  # killed while being started: that start must leave nothing, and forgets them
        try:
            ray.init(
                address=ray_address,
                _temp_dir=node_dir or None,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
        except BaseException as error:
            ray.shutdown()  # half a connection would be in the way of the next one
            if isinstance(error, ConnectionError | RuntimeError):
                raise ConnectionError(f"Ray is away: {_cause(error)}") from error
            raise

    def check_fits(self, num_workers: int) -> None:
        """Compare what the workers need with what Ray has, before asking it to wait for the impossible.

        Raises:
            ConfigError: they do not fit.
        """
        has = self._cpus()
        need = num_workers * self._placement.num_cpus
        if need > has:
            raise ConfigError(
                f"Ray cannot place {num_workers} workers: they need {need:g} CPU, it has {has:g};"
                " lower --prefill/--decode or controller.worker_num_cpus",
                field="controller.worker_num_cpus",
            )

    def start(self, config: WorkerConfig) -> str:
        """Create the worker's actor, or find the one that lives, and return its address once it serves.

        Raises:
            ConfigError: it cannot be placed, or its own start failed; one line says why.
            WorkerLost: it died while starting.
        """
        deadline_s = clock.now_s() + self._placement.start_timeout_s
        try:
            actor = self._create(config)
            if config.worker_id in self._ended:
                ray.kill(actor, no_restart=True)
            return str(ray.get(actor.address.remote(), timeout=clock.real_s(max(0.0, deadline_s - clock.now_s()))))
        except GetTimeoutError:
            raise ConfigError(
                self._timeout_reason(config.worker_id), field="controller.worker_start_timeout_s"
            ) from None
        except RayActorError as error:
            raise WorkerLost(f"{config.worker_id} did not start: {_cause(error)}") from error
        except (RayError, ConnectionError) as error:
            raise WorkerLost(f"Ray could not start {config.worker_id}: {_cause(error)}") from error
        finally:
            self._ended.discard(config.worker_id)

    def kill(self, worker_id: str, *, is_starting: bool) -> None:
        """Stop the worker for good; one that is not there is fine. `is_starting`: a `start` of it was asked for and has not
        returned, and is to fail."""
        if is_starting:
            self._ended.add(worker_id)  # before the look: either that sees the actor, or who creates it sees this
        try:
            actor = ray.get_actor(worker_id, NAMESPACE)
        except ValueError:
            return
        with contextlib.suppress(RayError):  # stuck or dying: the kill below ends it all the same
            ray.get(actor.stop.remote(), timeout=_STOP_S)
        ray.kill(actor, no_restart=True)

    def num_places(self) -> int:
        """How many workers fit in all."""
        return int(self._cpus() / self._placement.num_cpus)

    def close(self) -> None:
        ray.shutdown()

    def _cpus(self) -> float:
        """Of all nodes, whoever has them."""
        return float(ray.cluster_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]  # ray leaves it untyped

    def _create(self, config: WorkerConfig) -> ActorHandle[WorkerActor]:
        actor = RemoteWorker.options(
            name=config.worker_id,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=self._placement.num_cpus,
            num_gpus=self._placement.num_gpus,
            resources={f"{own_node}{config.worker_id}": 1.0} if (own_node := self._placement.own_node) else {},
        ).remote(to_json(config), self._placement.server, self._placement.log_dir)
        return cast("ActorHandle[WorkerActor]", actor)  # ray's own type also allows for a class

    def _timeout_reason(self, worker_id: str) -> str:
        free = float(ray.available_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]  # ray leaves it untyped
        waited = f"{self._placement.start_timeout_s:g} s"
        if free < self._placement.num_cpus:
            return (
                f"Ray cannot place {worker_id}: it needs {self._placement.num_cpus:g} CPU, {free:g} is free after"
                f" {waited}; lower --prefill/--decode"
            )
        return f"{worker_id} did not serve within {waited}; see its log, or raise controller.worker_start_timeout_s"


def _cause(error: Exception) -> str:
    """The last line of Ray's message, which ends with the exception that the actor raised; of ours, its words alone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].removeprefix(_CONFIG_ERROR) if lines else type(error).__name__
