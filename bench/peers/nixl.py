"""NIXL: its UCX backend on host memory, one-sided writes with a notification, prepared descriptor lists.

Each transfer makes a request from prepared lists and posts it, as vLLM's connector does for each prompt; the receiver learns
of it by NIXL's own notification. Needs the packages nixl-cu12 and nixl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.peers.messages import PeerStart
from bench.peers.process import Copy, Library, PeerFailed, Pool, serve

DONE, ERROR = "DONE", "ERR"


@dataclass(frozen=True, slots=True)
class _Prepared:
    ours: Any  # NIXL's handles
    theirs: Any
    indices: np.ndarray[tuple[int], np.dtype[np.int32]]  # of all descriptors


class Nixl:
    def __init__(self, start: PeerStart, pool: Pool) -> None:
        """Raises: PeerFailed: it is not installed, or its UCX does not start."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise PeerFailed(f"nixl cannot be imported: {error}") from error
        config = nixl_agent_config(enable_prog_thread=start.progress_thread, backends=["UCX"])
        self._agent: Any = nixl_agent(start.name, config)
        self._registered = self._agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
        self._other = ""
        self._num_expected = 0
        self._prepared: list[_Prepared] = []

    def hello(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def meet(self, hello: bytes) -> None:
        name = self._agent.add_remote_agent(hello)
        self._other = name.decode() if isinstance(name, bytes) else name
        self._agent.make_connection(self._other)

    def prepare(self, transfers: Sequence[Sequence[Copy]]) -> None:
        self._prepared = [
            _Prepared(
                self._prepare("NIXL_INIT_AGENT", [(copy.source, copy.nbytes, 0) for copy in copies]),
                self._prepare(self._other, [(copy.target, copy.nbytes, 0) for copy in copies]),
                np.arange(len(copies), dtype=np.int32),
            )
            for copies in transfers
        ]

    def write(self) -> None:
        handles = [self._post(prepared) for prepared in self._prepared]
        waiting = list(handles)
        while waiting:
            states = [(handle, self._agent.check_xfer_state(handle)) for handle in waiting]
            if any(state == ERROR for _, state in states):
                raise PeerFailed("a NIXL transfer failed")
            waiting = [handle for handle, state in states if state != DONE]
        for handle in handles:
            handle.release()

    def _post(self, prepared: _Prepared) -> Any:
        indices = prepared.indices
        handle = self._agent.make_prepped_xfer("WRITE", prepared.ours, indices, prepared.theirs, indices, b"kv")
        if self._agent.transfer(handle) == ERROR:
            raise PeerFailed("a NIXL transfer could not be posted")
        return handle

    def _prepare(self, owner: str, descriptors: list[tuple[int, int, int]]) -> Any:
        return self._agent.prep_xfer_dlist(owner, np.array(descriptors, dtype=np.uint64), "DRAM")

    def expect(self, num_transfers: int) -> None:
        self._num_expected = num_transfers

    def arrived(self) -> bool:
        """Also what moves the bytes where there is no progress thread."""
        if self._num_expected:
            self._num_expected -= sum(map(len, self._agent.get_new_notifs().values()))
        return not self._num_expected


def make(start: PeerStart, pool: Pool) -> Library:
    return Nixl(start, pool)


if __name__ == "__main__":
    serve(make)
