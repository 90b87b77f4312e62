"""`python -m tests.kube.kube_controller --config FILE`: router.controller.main, whose Ray is a PodRay of the test.

$POD_RAY_PORT and $POD_RAY_KEY lead to it. A worker that has drained is ended at once: that its clients could resume what they had
there (levers.py) would hold up each test for minutes.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from baton.config import ClusterConfig
from router.controller import live_control, ray_actors
from router.controller.levers import Waits
from router.controller.ray_actors import Pools
from tests.kube.pod_ray import ray_through


def connect(cluster: ClusterConfig) -> Pools:
    return ray_through(int(os.environ["POD_RAY_PORT"]), os.environ["POD_RAY_KEY"].encode())


if __name__ == "__main__":  # before whoever takes these is imported
    vars(ray_actors)["connect"] = connect
    vars(live_control)["Waits"] = partial(Waits, resumed_s=0.0)
    from router.controller.main import main

    sys.exit(main())
