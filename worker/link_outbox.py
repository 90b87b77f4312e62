"""What one end of a link still has to write, oldest first; bounded in bytes.

gRPC takes a message only when the peer reads, so a peer that does not would let this grow until it counts as silent. Beyond
the bound nothing more is taken and what waits is dropped: the link is over (`links.py`). Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from baton.v1 import kv_pb2

MAX_OUTBOX_BYTES = 4 << 20  # as a router's outbox, DESIGN section 7


class LinkOutbox:
    """Holds at most `max_bytes` and one message."""

    def __init__(self, max_bytes: int = MAX_OUTBOX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # not taken by gRPC yet
        self.overflowed = asyncio.Event()
        self._messages: deque[tuple[int, kv_pb2.LinkMessage]] = deque()
        self._ended = False
        self._wake = asyncio.Event()

    def put(self, message: kv_pb2.LinkMessage) -> bool:
        """False: the end was said, or the peer does not keep up; the message is not sent."""
        if self._ended:
            return False
        if self.num_bytes > self.max_bytes:
            self._messages.clear()
            self.num_bytes = 0
            self.overflowed.set()
            self.end()
            return False
        size = message.ByteSize()
        self._messages.append((size, message))
        self.num_bytes += size
        self._wake.set()
        return True

    def end(self) -> None:
        """Let the writer finish after what waits already."""
        self._ended = True
        self._wake.set()

    async def messages(self) -> AsyncIterator[kv_pb2.LinkMessage]:
        """What to write to the stream, until its end."""
        while self._messages or not self._ended:
            while self._messages:
                size, message = self._messages[0]
                yield message
                if self._messages:  # not dropped meanwhile
                    self._messages.popleft()
                    self.num_bytes -= size
            self._wake.clear()
            if not self._ended:
                await self._wake.wait()
