"""Ask UCX which transports an endpoint really uses. ucxx has no call for it, so libucp is called through ctypes.

Source: ucp_ep_query and ucp_ep_attr_t in ucp/api/ucp.h, ucp_transports_t in ucp/api/ucp_def.h of UCX 1.21. The structures carry
a field mask and entry sizes, so a later UCX with more fields fills the same ones.
"""

from __future__ import annotations

import ctypes

from kv_transfer.ucx.ucp import OK, library

_FIELD_TRANSPORTS = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS
_NAME_BYTES = 32  # UCP_ENTITY_NAME_MAX
_SOCKADDR_STORAGE_BYTES = 128  # Linux
_MAX_ENTRIES = 16  # lanes of one endpoint; UCX itself allows 16 (UCP_MAX_LANES)


class _TransportEntry(ctypes.Structure):
    _fields_ = (("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.POINTER(_TransportEntry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _EpAttr(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * _NAME_BYTES),
        ("local_sockaddr", ctypes.c_uint64 * (_SOCKADDR_STORAGE_BYTES // 8)),
        ("remote_sockaddr", ctypes.c_uint64 * (_SOCKADDR_STORAGE_BYTES // 8)),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


def endpoint_transports(handle: int) -> list[str]:
    """ "transport/device" of every lane of the endpoint `handle` (a ucp_ep_h), in UCX's order; [] if UCX does not say."""
    entries = (_TransportEntry * _MAX_ENTRIES)()
    attr = _EpAttr(field_mask=_FIELD_TRANSPORTS)
    attr.transports.entries = ctypes.cast(entries, ctypes.POINTER(_TransportEntry))
    attr.transports.num_entries = _MAX_ENTRIES
    attr.transports.entry_size = ctypes.sizeof(_TransportEntry)
    if library().ucp_ep_query(handle, ctypes.byref(attr)) != OK:
        return []
    found = entries[: attr.transports.num_entries]
    return [f"{entry.transport_name.decode()}/{entry.device_name.decode()}" for entry in found]
