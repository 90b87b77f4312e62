"""Memory that UCX allocates so that peers may map it, and a peer's memory mapped here. ucxx has no calls for either.

Shared-memory transports let `ucp_rkey_ptr` turn a remote key into a local address; other transports refuse, and the owner of
the path then sends bytes. A mapping stays readable and writable after the other process died: its pages live as long as anyone
maps them, so a late access harms nobody. Segments carry no name once they are mapped (UCX removes it at once), so a killed
process leaves none behind.

Source: ucp_mem_map, ucp_rkey_pack, ucp_ep_rkey_unpack, ucp_rkey_ptr in ucp/api/ucp.h of UCX 1.21. KV thread, but for
`allocate`, which comes before it starts.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

import libucx  # type: ignore[import-untyped]

from baton.errors import ConfigError

_MAP_FIELDS = 1 << 1 | 1 << 2  # UCP_MEM_MAP_PARAM_FIELD_LENGTH, _FLAGS
_MAP_ALLOCATE = 1 << 1  # UCP_MEM_MAP_ALLOCATE
_ATTR_ADDRESS = 1 << 0  # UCP_MEM_ATTR_FIELD_ADDRESS
_MADV_POPULATE_WRITE = 23  # Linux 5.14; madvise(2)
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


class MappedRegion:
    """A peer's region at an address of this process, until `close`."""

    def __init__(self, rkey: ctypes.c_void_p, address: int, nbytes: int) -> None:
        self._rkey = rkey
        self.address = address
        self.nbytes = nbytes

    def view(self) -> memoryview:
        """The bytes; not to be used after `close`."""
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")

    def prefault(self) -> None:
        """Make its pages writable now, so that the first frames do not pay for it; older kernels leave it to them."""
        _libc.madvise(self.address, self.nbytes, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        _library().ucp_rkey_destroy(self._rkey)


def map_region(endpoint_handle: int, region: Region) -> MappedRegion | None:
    """Map a peer's region; None where the endpoint's transports cannot, or it is not as large as the peer says."""
    ucp = _library()
    rkey, pointer = _handle(), _handle()
    if ucp.ucp_ep_rkey_unpack(endpoint_handle, region.rkey, ctypes.byref(rkey)) != 0:
        return None
    status = ucp.ucp_rkey_ptr(rkey, region.address, ctypes.byref(pointer))
    if status == 0 and pointer.value is not None and _is_mapped(pointer.value, region.nbytes):
        return MappedRegion(rkey, pointer.value, region.nbytes)
    ucp.ucp_rkey_destroy(rkey)
    return None


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
    return _ucp


_ucp: ctypes.CDLL | None = None  # loaded once, on first use
