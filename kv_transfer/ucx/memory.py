"""Memory that UCX allocates so that peers may map it, and a peer's memory mapped here. ucxx has no calls for either.

Shared-memory transports let `ucp_rkey_ptr` turn a remote key into a local address; through others the region is written with
puts. A mapping stays readable and writable after the other process died: its pages live as long as anyone
maps them, so a late access harms nobody. Segments carry no name once they are mapped (UCX removes it at once), so a killed
process leaves none behind.

Source: ucp_mem_map, ucp_rkey_pack, ucp_ep_rkey_unpack, ucp_rkey_ptr, ucp_put_nbx, ucp_ep_flush_nbx in ucp/api/ucp.h of UCX 1.21.
KV thread, but for `allocate` of a block pool, which comes before it starts.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any, TypeAlias

import libucx  # type: ignore[import-untyped]

from baton.errors import ConfigError, TransferFailed

_MAP_FIELDS = 1 << 1 | 1 << 2  # UCP_MEM_MAP_PARAM_FIELD_LENGTH, _FLAGS
_MAP_ALLOCATE = 1 << 1  # UCP_MEM_MAP_ALLOCATE
_ATTR_ADDRESS = 1 << 0  # UCP_MEM_ATTR_FIELD_ADDRESS
_IN_PROGRESS = 1  # UCS_INPROGRESS in ucs/type/status.h
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; madvise(2)
MAX_PREFAULT_BYTES = 1 << 30
_handle = ctypes.c_void_p
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (_handle, ctypes.c_size_t, ctypes.c_int)


class _MapParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("flags", ctypes.c_uint),
        ("prot", ctypes.c_uint),
        ("memory_type", ctypes.c_int),
        ("exported_memh_buffer", ctypes.c_void_p),
    )


class _RequestParams(ctypes.Structure):
    """ucp_request_param_t with no field set but the mask, which says so; the rest is only room for it."""

    _fields_ = (("op_attr_mask", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("fields", ctypes.c_uint64 * 16))


class _MemAttr(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("mem_type", ctypes.c_int),
    )


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
    ucp = _library()
    params = _MapParams(field_mask=_MAP_FIELDS, length=nbytes, flags=_MAP_ALLOCATE)
    memh = _handle()
    status = ucp.ucp_mem_map(context.handle, ctypes.byref(params), ctypes.byref(memh))
    if status != 0:
        raise ConfigError(
            f"UCX cannot allocate {nbytes >> 20} MiB (status {status}): give the worker more memory, enlarge the shared "
            "memory of its container, or use fewer blocks",
            field="engine.kv_cache_bytes",
        )
    attr = _MemAttr(field_mask=_ATTR_ADDRESS)
    _check(ucp.ucp_mem_query(memh, ctypes.byref(attr)), "ucp_mem_query")
    packed, size = _handle(), ctypes.c_size_t()
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
        ucp = _library()
        self._region = region
        self._endpoint = endpoint_handle
        self._rkey = _handle()
        if ucp.ucp_ep_rkey_unpack(endpoint_handle, region.rkey, ctypes.byref(self._rkey)) != 0:
            raise TransferFailed("the peer's memory key cannot be used on this path")
        pointer = _handle()
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

    def put(self, data: memoryview, offset: int) -> PendingPut:
        """Begin to write `data` at `offset` of the region; `data` stays as it is until the put is done."""
        ucp = _library()
        source = ctypes.addressof(ctypes.c_ubyte.from_buffer(data))
        where = self._region.address + offset
        put = ucp.ucp_put_nbx(self._endpoint, source, data.nbytes, where, self._rkey, ctypes.byref(_NO_OPTIONS))
        if not _is_error(put):
            if put:
                ucp.ucp_request_free(put)  # it goes on by itself, and the flush ends after it
            put = ucp.ucp_ep_flush_nbx(self._endpoint, ctypes.byref(_NO_OPTIONS))
        return PendingPut(put)

    def close(self) -> None:
        _library().ucp_rkey_destroy(self._rkey)


class PendingPut:
    """A put and the flush behind it. Poll `status` until it is not IN_PROGRESS; closing the endpoint ends it too."""

    def __init__(self, request: int | None) -> None:
        self._request = request
        self._status = _IN_PROGRESS

    def status(self) -> int:
        """A ucs_status_t: 0 once all bytes are in the peer's memory, IN_PROGRESS, or an error below 0."""
        if self._status == _IN_PROGRESS:
            if not self._request:
                self._status = 0
            elif _is_error(self._request):
                self._status = ctypes.c_int8(self._request & 0xFF).value
            else:
                self._status = _library().ucp_request_check_status(self._request)
                if self._status != _IN_PROGRESS:
                    _library().ucp_request_free(self._request)
        return self._status

    @property
    def in_progress(self) -> bool:
        return self.status() == _IN_PROGRESS


def _is_error(pointer: int | None) -> bool:
    """Source: UCS_PTR_IS_ERR in ucs/type/status.h: the last 100 addresses are negated error codes."""
    return pointer is not None and pointer >= (1 << 64) - 100


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
    _library().ucp_mem_unmap(context.handle, memh)


def _check(status: int, call: str) -> None:
    assert status == 0, f"{call} failed with status {status}"


def _library() -> ctypes.CDLL:
    global _ucp
    if _ucp is None:
        _ucp = libucx.load_library()[-1]
        for name in _RETURN_STATUS:
            getattr(_ucp, name).restype = ctypes.c_int8  # ucs_status_t is a packed enum: one byte
        _ucp.ucp_mem_map.argtypes = (_handle, ctypes.POINTER(_MapParams), ctypes.POINTER(_handle))
        _ucp.ucp_mem_query.argtypes = (_handle, ctypes.POINTER(_MemAttr))
        _ucp.ucp_mem_unmap.argtypes = (_handle, _handle)
        _ucp.ucp_rkey_pack.argtypes = (
            _handle, _handle, ctypes.POINTER(_handle), ctypes.POINTER(ctypes.c_size_t),
        )  # fmt: skip
        _ucp.ucp_rkey_buffer_release.argtypes = (_handle,)
        _ucp.ucp_rkey_buffer_release.restype = None
        _ucp.ucp_ep_rkey_unpack.argtypes = (_handle, ctypes.c_char_p, ctypes.POINTER(_handle))
        _ucp.ucp_rkey_ptr.argtypes = (_handle, ctypes.c_uint64, ctypes.POINTER(_handle))
        _ucp.ucp_rkey_destroy.argtypes = (_handle,)
        _ucp.ucp_rkey_destroy.restype = None
        _ucp.ucp_put_nbx.argtypes = (
            _handle, _handle, ctypes.c_size_t, ctypes.c_uint64, _handle, ctypes.POINTER(_RequestParams),
        )  # fmt: skip
        _ucp.ucp_put_nbx.restype = _handle
        _ucp.ucp_ep_flush_nbx.argtypes = (_handle, ctypes.POINTER(_RequestParams))
        _ucp.ucp_ep_flush_nbx.restype = _handle
        _ucp.ucp_request_check_status.argtypes = (_handle,)
        _ucp.ucp_request_free.argtypes = (_handle,)
        _ucp.ucp_request_free.restype = None
    return _ucp


_RETURN_STATUS = (
    "ucp_mem_map", "ucp_mem_query", "ucp_mem_unmap", "ucp_rkey_pack", "ucp_ep_rkey_unpack", "ucp_rkey_ptr",
    "ucp_request_check_status",
)  # fmt: skip
_NO_OPTIONS = _RequestParams(op_attr_mask=0)
_ucp: ctypes.CDLL | None = None  # loaded once, on first use
