"""What the same work costs after a pause: `python -m bench.cold_caches`.

600 small functions called one after the other, as a request calls those of a router, in a row and with pauses between the
rounds. CPU time of the thread: pauses cost it nothing by themselves; what is more is caches that others filled meanwhile, and
a core that slept. So a request's cost depends on how many there are per second: docs/router_cost.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

NUM_FUNCTIONS = 600  # half of those that a request of two tokens calls (cProfile: 1,340)
PAUSES_MS = (0.0, 1.0, 4.0, 20.0)  # 4 ms: 250 requests per second
NUM_ROUNDS = 300


def functions() -> list[Callable[[dict[str, int]], object]]:
    """Each with code of its own."""
    names: dict[str, Callable[[dict[str, int]], object]] = {}
    source = [
        f"def f{i}(d):\n y = [d.get('k{i}', {i}), {i}]; d['k{i}'] = len(str(y[0])) + y[1]; return tuple(y)"
        for i in range(NUM_FUNCTIONS)
    ]
    exec("\n".join(source), names)  # our own text
    return [names[f"f{i}"] for i in range(NUM_FUNCTIONS)]


def main() -> None:
    work = functions()
    for pause_ms in PAUSES_MS:
        costs_us = []
        for _ in range(NUM_ROUNDS):
            time.sleep(1e-3 * pause_ms)
            began_s, room = time.thread_time(), dict[str, int]()
            for function in work:
                function(room)
            costs_us.append(1e6 * (time.thread_time() - began_s))
        print(
            f"{pause_ms:5.0f} ms between rounds: {statistics.median(costs_us):6.0f} us each, n = {NUM_ROUNDS}",
            flush=True,
        )


if __name__ == "__main__":
    main()
