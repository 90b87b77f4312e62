"""Sends and puts under way: what ucxx calls a request, for the calls that we make ourselves.

Puts are not in ucxx's Python. Sends are, but ucxx 0.52 keeps a send that is incomplete when its endpoint is closed in a set that
only its progress thread empties: endpoint, worker and the worker's TCP listener then live as long as the process. A pair that
is lost before it is wired up is such a case.

KV thread.
"""

from __future__ import annotations

import ctypes

from kv_transfer.ucx.ucp import IN_PROGRESS, NO_OPTIONS, OK, error_status, is_error, library


class PendingRequest:
    """A call that UCX carries out; keeps the bytes that it reads. Closing the endpoint completes it too."""

    def __init__(self, request: int | None, data: memoryview) -> None:
        self._request = request
        self._status = OK if not request else error_status(request) if is_error(request) else IN_PROGRESS
        self._data: memoryview | None = data if self._status == IN_PROGRESS else None

    @property
    def status(self) -> int:
        """A ucs_status_t: 0 when it is done, IN_PROGRESS, or an error below 0."""
        if self._status == IN_PROGRESS:
            self._status = library().ucp_request_check_status(self._request)
            if self._status != IN_PROGRESS:
                library().ucp_request_free(self._request)
                self._data = None
        return self._status

    @property
    def completed(self) -> bool:
        return self.status != IN_PROGRESS


def tag_send(endpoint: int, data: memoryview, tag: int) -> PendingRequest:
    """Send `data`, whose bytes stay as they are until the request is completed. `endpoint` is a ucp_ep_h."""
    request = library().ucp_tag_send_nbx(endpoint, _address(data), data.nbytes, tag, ctypes.byref(NO_OPTIONS))
    return PendingRequest(request, data)


def put(endpoint: int, data: memoryview, remote_address: int, remote_key: ctypes.c_void_p) -> PendingRequest:
    """Write `data` into a peer's memory; completed when it has arrived there."""
    ucp, options = library(), ctypes.byref(NO_OPTIONS)
    request = ucp.ucp_put_nbx(endpoint, _address(data), data.nbytes, remote_address, remote_key, options)
    if not is_error(request):
        if request:
            ucp.ucp_request_free(request)  # it goes on by itself, and the flush ends after it
        request = ucp.ucp_ep_flush_nbx(endpoint, options)
    return PendingRequest(request, data)


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(data))
