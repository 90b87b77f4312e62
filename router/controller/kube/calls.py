"""Blocking calls to the API server, off the event loop: on threads of their own, so that a server that hangs takes neither the
database's nor Ray's. Each call has its own deadlines (client.py); beyond all of them it is given up here and ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.errors import Unavailable

_MAX_CALLS = 4  # at once; of one controller. Calls take milliseconds
GIVE_UP_S = 15.0  # a resize may read and write a few times; a call that waits for its turn counts as away

Answer = TypeVar("Answer")


class KubeCalls:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="kube")

    async def run(self, call: Callable[[], Answer]) -> Answer:
        """Raises: as the call does; Unavailable: it does not end, or the process stops."""
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        except RuntimeError as error:
            raise Unavailable("the controller stops") from error
        try:
            async with asyncio.timeout(GIVE_UP_S):
                return await asyncio.shield(future)
        except TimeoutError:
            future.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody waits for it any more
            raise Unavailable(f"the API server did not answer within {GIVE_UP_S:g} s") from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
