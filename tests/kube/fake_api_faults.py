"""What can go wrong with the fake API server, put there by a test.

A fault says which calls it meets and what becomes of them; `faults.add` returns it, so that a test can see how often it struck
and take it away again. The first that fits a call is the only one it meets.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from tests.kube.fake_api_rbac import Access
from tests.kube.fake_api_resources import ApiError

REASONS = {
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass(slots=True)
class Fault:
    """Every criterion that is set must fit. With neither code nor drop the call goes on after its delay."""

    verb: str = ""  # "" is any; as in RBAC: get list watch create update patch delete deletecollection
    resource: str = ""  # plural, with "/scale" and the like for a subresource
    name: str = ""
    times: int | None = None  # None: until removed
    delay_s: float = 0.0  # before anything else happens
    code: int = 0  # answered instead of acting
    retry_after_s: int | None = None
    drop: bool = False  # the connection closes without an answer, nothing was done
    drop_answer: bool = False  # it was done, and the connection closes without an answer
    cut_after: int | None = None  # a watch ends in the middle of the line that follows so many events
    hits: int = 0
    released: threading.Event = field(default_factory=threading.Event)  # ends a delay early

    def fits(self, access: Access) -> bool:
        return (
            (self.times is None or self.hits < self.times)
            and self.verb in ("", access.verb)
            and self.resource in ("", access.path)
            and self.name in ("", access.name)
        )

    def error(self) -> ApiError | None:
        if not self.code:
            return None
        reason = REASONS.get(self.code, "InternalError")
        return ApiError(self.code, reason, f"injected: {reason}", retry_after_s=self.retry_after_s)


class Faults:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        """What it holds up goes on."""
        with self._lock:
            self._faults.remove(fault)
        fault.released.set()

    def clear(self) -> None:
        for fault in list(self._faults):
            self.remove(fault)

    def meet(self, access: Access) -> Fault | None:
        """The fault that this call meets, counted."""
        with self._lock:
            fault = next((f for f in self._faults if f.fits(access)), None)
            if fault is not None:
                fault.hits += 1
            return fault
