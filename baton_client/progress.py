"""How far one call has come, and what to send next: the logic of every client here, without any I/O.

    1 FRESH    send Generate. Refused by a server that may be asked again: still 1
    2 BEGUN    a connection broke, or tokens have come: send Resume, which says what is here. Where nobody knows the call and
               nothing has come, 1 again
    3 OVER     done, or CallFailed
Calls that are not resumable have no 2: once something has come, a broken connection ends them.
"""

from __future__ import annotations

import time

from baton.v1 import serving_pb2
from baton_client.errors import CallFailed
from baton_client.retry import RetryBudget, RetryPolicy

Message = serving_pb2.GenerateRequest | serving_pb2.ResumeRequest


class Progress:
    """One call. `deadline_s` is monotonic."""

    def __init__(
        self, request: serving_pb2.GenerateRequest, deadline_s: float | None, policy: RetryPolicy, budget: RetryBudget
    ) -> None:
        self.request = request
        self.done: serving_pb2.Done | None = None
        self._received: list[list[int]] = [[] for _ in range(request.sampling.n or 1)]
        self._has_tail: set[int] = set()
        self._deadline_s = deadline_s
        self._policy = policy
        self._budget = budget
        self._begun = False
        self._num_failed = 0  # attempts in a row without a new token

    def next_message(self) -> Message:
        if not self._begun:
            return self.request
        return serving_pb2.ResumeRequest(
            request_id=self.request.request_id,
            next_index=[len(token_ids) for token_ids in self._received],
            max_flush_ms=self.request.max_flush_ms,
            received=[serving_pb2.TokenIds(ids=token_ids) for token_ids in self._received],
        )

    @property
    def timeout_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def take(self, chunk: serving_pb2.Chunk) -> bool:
        """Note what came; False for what is here already: text behind an answer's last token, which a resumed call says again."""
        self._begun = self.request.resumable
        if not chunk.token_ids:
            if chunk.choice in self._has_tail:
                return False
            self._has_tail.add(chunk.choice)
        self._num_failed = 0
        self._received[chunk.choice] += chunk.token_ids
        return True

    def finish(self, done: serving_pb2.Done) -> None:
        self.done = done
        self._budget.succeeded()

    @property
    def _has_any(self) -> bool:
        return any(self._received)

    def delay_s(self, error: CallFailed) -> float:
        """How long to wait before the next message. Raises: `error`, where there is none."""
        if not self._may_go_on(error):
            raise error
        self._num_failed += 1
        delay_s = self._policy.delay_s(self._num_failed, error.retry_after_s)
        left_s = self.timeout_s
        if self._num_failed >= self._policy.max_attempts or (left_s is not None and delay_s >= left_s):
            raise error
        if not self._budget.take():
            raise error
        return delay_s

    def _may_go_on(self, error: CallFailed) -> bool:
        if not self.request.resumable:
            return error.retryable and not self._has_any
        if error.status == "ALREADY_EXISTS" and not self._begun:  # our own, over a connection that broke unnoticed
            self._begun = True
            return True
        if error.status == "NOT_FOUND" and self._begun and not self._has_any:  # it never got as far as a worker
            self._begun = False
            return True
        if error.retryable and not self._begun and not error.was_said:
            self._begun = True
        return error.retryable
