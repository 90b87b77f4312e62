"""Memory that UCX allocates so that peers may map it, and a peer's memory mapped here. ucxx has no calls for either.

Shared-memory transports let `ucp_rkey_ptr` turn a remote key into a local address; through others the region is written with
puts. A mapping stays readable and writable after the other process died: its pages live as long as anyone maps them, so a late
access harms nobody. Segments carry no name once they are mapped (UCX removes it at once), so a killed process leaves none behind.

KV thread, but for `allocate` of a block pool, which comes before it starts.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any, TypeAlias

from baton.errors import ConfigError, TransferFailed
from kv_transfer.ucx.requests import PendingRequest, put
from kv_transfer.ucx.ucp import ATTR_ADDRESS, MAP_ALLOCATE, MAP_FIELDS, Handle, MapParams, MemAttr, library

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; madvise(2)
MAX_PREFAULT_BYTES = 1 << 30
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (Handle, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of one worker as its peers are told of it."""

    address: int  # in the owner's process
    nbytes: int
    rkey: bytes  # what ucp_rkey_pack made

    def holds(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes


Slots: TypeAlias = tuple[memoryview, Region]  # of a ring, or of frames being made


def allocate(context: Any, nbytes: int) -> tuple[memoryview, Region]:
    """Allocate `nbytes` of zeros through UCX: shared memory where the context has such a transport, private memory else.

    The memory lives until the last view of it is gone.

    Raises:
        ConfigError: there is not enough.
    """
    ucp = library()
    params = MapParams(field_mask=MAP_FIELDS, length=nbytes, flags=MAP_ALLOCATE)
    memh = Handle()
    status = ucp.ucp_mem_map(context.handle, ctypes.byref(params), ctypes.byref(memh))
    if status != 0:
        raise ConfigError(
            f"UCX cannot allocate {nbytes >> 20} MiB (status {status}): give the worker more memory, enlarge the shared "
            "memory of its container, or use fewer blocks",
            field="engine.kv_memory_bytes",
        )
    attr = MemAttr(field_mask=ATTR_ADDRESS)
    _check(ucp.ucp_mem_query(memh, ctypes.byref(attr)), "ucp_mem_query")
    packed, size = Handle(), ctypes.c_size_t()
    _check(ucp.ucp_rkey_pack(context.handle, memh, ctypes.byref(packed), ctypes.byref(size)), "ucp_rkey_pack")
    rkey = ctypes.string_at(packed, size.value)
    ucp.ucp_rkey_buffer_release(packed)
    ctypes.memset(attr.address, 0, nbytes)  # first touch, 0.2-0.4 GB/s: paid here and not by a transfer
    memory = (ctypes.c_ubyte * nbytes).from_address(attr.address)
    weakref.finalize(memory, _unmap, context, memh).atexit = False  # at exit the kernel does it
    return memoryview(memory).cast("B"), Region(attr.address, nbytes, rkey)


class RemoteRegion:
    """A peer's region as an endpoint reaches it: mapped here, or written to with puts. Until `close`."""

    def __init__(self, endpoint_handle: int, region: Region) -> None:
        """Raises: TransferFailed where UCX does not take the key."""
        ucp = library()
        self._region = region
        self._endpoint = endpoint_handle
        self._rkey = Handle()
        if ucp.ucp_ep_rkey_unpack(endpoint_handle, region.rkey, ctypes.byref(self._rkey)) != 0:
            raise TransferFailed("the peer's memory key cannot be used on this path")
        pointer = Handle()
        status = ucp.ucp_rkey_ptr(self._rkey, region.address, ctypes.byref(pointer))
        is_mapped = status == 0 and pointer.value is not None and _is_mapped(pointer.value, region.nbytes)
        self.address: int | None = pointer.value if is_mapped else None  # in this process; None: only puts reach it

    def view(self) -> memoryview:
        """The bytes of a mapped region; not to be used after `close`."""
        assert self.address is not None, "not mapped"
        return memoryview((ctypes.c_ubyte * self._region.nbytes).from_address(self.address)).cast("B")

    def prefault(self, *, writable: bool) -> None:
        """Map a mapped region's pages now, so that the first frames do not pay for it; old kernels leave it to them.

        At most MAX_PREFAULT_BYTES, as the caller waits: 0.09-0.16 s per GiB (measured: docs/kv_transfer.md).
        """
        advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
        _libc.madvise(self.address, min(self._region.nbytes, MAX_PREFAULT_BYTES), advice)

    def put(self, data: memoryview, offset: int) -> PendingRequest:
        """Begin to write `data` at `offset` of the region; `data` stays as it is until the put is done."""
        return put(self._endpoint, data, self._region.address + offset, self._rkey)

    def close(self) -> None:
        library().ucp_rkey_destroy(self._rkey)


def _is_mapped(address: int, nbytes: int) -> bool:
    """Whether one writable mapping of this process holds all of it: a peer's word about its length is not taken."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access = line.split(maxsplit=2)[:2]
            start, stop = (int(place, 16) for place in span.split("-"))
            if start <= address < stop:
                return access.startswith("rw") and address + nbytes <= stop
    return False


def _unmap(context: Any, memh: ctypes.c_void_p) -> None:
    library().ucp_mem_unmap(context.handle, memh)


def _check(status: int, call: str) -> None:
    assert status == 0, f"{call} failed with status {status}"
