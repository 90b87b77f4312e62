"""`baton sim --autoscale`: the product's autoscaler on the simulated fleet. Its flags, and what they make."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from baton.errors import ConfigError
from baton.request import Role
from bench.serve_cli import positive_float, positive_int
from bench.sim.call import Call
from bench.sim.control import ControlledRun
from bench.sim.delays import Delay, Delays
from bench.sim.deployment import Deployment
from bench.sim.simulation import Mix
from router.admission import Bounds
from router.controller.autoscaler.autoscaler import Autoscaler
from router.controller.autoscaler.scaler import Times
from router.controller.settings import Budget, PoolBounds

_TIMES, _DELAYS = Times(), Delays()


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("autoscaling").add_argument
    add("--autoscale", action="store_true", help="let the autoscaler change the fleet, from the given layout on")
    add("--tick", type=positive_float, default=_TIMES.tick_s, help="seconds between its looks (%(default)s)")
    add("--start-up", type=delay, default=_DELAYS.start_up, help="of a new worker: SECONDS, or P50,P95 (%(default)s)")
    add(
        "--flip-time",
        type=delay,
        default=_DELAYS.flip,
        help="of an idle worker to another role, likewise (%(default)s)",
    )
    add("--max-gpus", type=positive_int, help="its budget; default: none")


def delay(text: str) -> Delay:
    try:
        return Delay.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def controlled_run(
    args: argparse.Namespace,
    deployment: Deployment,
    mix: Mix,
    seed: int,
    *,
    warm_up_s: float,
    bounds: Bounds | None,
    fast: bool,
    on_call: Callable[[Call], None] | None,
) -> ControlledRun:
    """Its pools keep one worker each of those that the layout has.

    Raises:
        ConfigError: a budget below the layout.
    """
    if args.max_gpus is not None and args.max_gpus < deployment.num_gpus:
        raise ConfigError(f"--max-gpus is {args.max_gpus}; the limit is at least the layout's {deployment.num_gpus}")
    times = Times(tick_s=args.tick, start_up_s=args.start_up.p50_s, flip_s=args.flip_time.p50_s)
    least = {role: PoolBounds(min_workers=min(1, deployment.layout.roles.count(role))) for role in Role}
    return ControlledRun(
        deployment,
        mix,
        Autoscaler(times),
        times,
        Budget(args.max_gpus, *(least[role] for role in Role)),
        seed,
        delays=Delays(start_up=args.start_up, restart=args.start_up, flip=args.flip_time),
        warm_up_s=warm_up_s,
        bounds=bounds,
        fast=fast,
        on_call=on_call,
    )
