"""Why transfers fail, as a closed set that metrics can carry: the words of `OutgoingClosed` and `IncomingClosed`, by kind."""

from __future__ import annotations

import enum


class FailureReason(enum.StrEnum):
    PEER_LOST = "peer_lost"  # its process, its link or the data path
    EXPIRED = "expired"  # silent for longer than the lease
    DAMAGED = "damaged"  # more often than it may be sent again
    NO_ACK = "no_ack"  # sent, but never acknowledged
    STALE_TICKET = "stale_ticket"  # of another epoch, or given up by the decode worker
    REFUSED_COMMIT = "refused_commit"  # Commit for a ticket that is not there
    REPLACED = "replaced"  # the same seq was opened again
    DEADLINE = "deadline"  # the call's time was over
    OTHER = "other"


_BEGINNINGS = {
    "peer lost": FailureReason.PEER_LOST,
    "lease expired": FailureReason.EXPIRED,
    "expired": FailureReason.EXPIRED,
    "damaged": FailureReason.DAMAGED,
    "replaced": FailureReason.REPLACED,
    "the ticket is of another epoch": FailureReason.STALE_TICKET,
}


def failure_reason(text: str) -> FailureReason:
    """The kind of a transfer's `reason`, which is one of ours or begins with words of the plane."""
    if text in set(FailureReason):
        return FailureReason(text)
    found = (reason for beginning, reason in _BEGINNINGS.items() if text.startswith(beginning))
    return next(found, FailureReason.OTHER)
