"""The part of libucp that ucxx does not wrap, through ctypes: the library with its signatures, and its structures.

Source: ucp/api/ucp.h and ucs/type/status.h of UCX 1.21. Structures carry a field mask, so a later UCX with more fields reads
the same ones.
"""

from __future__ import annotations

import ctypes

import libucx  # type: ignore[import-untyped]

OK, IN_PROGRESS, TRUNCATED = 0, 1, -9  # UCS_OK, UCS_INPROGRESS, UCS_ERR_MESSAGE_TRUNCATED
MAP_FIELDS = 1 << 1 | 1 << 2  # UCP_MEM_MAP_PARAM_FIELD_LENGTH, _FLAGS
MAP_ALLOCATE = 1 << 1  # UCP_MEM_MAP_ALLOCATE
ATTR_ADDRESS = 1 << 0  # UCP_MEM_ATTR_FIELD_ADDRESS
Handle = ctypes.c_void_p


class MapParams(ctypes.Structure):
    """ucp_mem_map_params_t."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("flags", ctypes.c_uint),
        ("prot", ctypes.c_uint),
        ("memory_type", ctypes.c_int),
        ("exported_memh_buffer", ctypes.c_void_p),
    )


class MemAttr(ctypes.Structure):
    """ucp_mem_attr_t."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("mem_type", ctypes.c_int),
    )


class RequestParams(ctypes.Structure):
    """ucp_request_param_t with no field set but the mask, which says so; the rest is only room for it."""

    _fields_ = (("op_attr_mask", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("fields", ctypes.c_uint64 * 16))


NO_OPTIONS = RequestParams(op_attr_mask=0)


def library() -> ctypes.CDLL:
    """libucp, the one that ucxx uses."""
    global _ucp
    if _ucp is None:
        _ucp = libucx.load_library()[-1]
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(_ucp, name)
            function.restype, function.argtypes = result, arguments
    return _ucp


def is_error(pointer: int | None) -> bool:
    """Source: UCS_PTR_IS_ERR: the last 100 addresses are negated error codes."""
    return pointer is not None and pointer >= (1 << 64) - 100


def error_status(pointer: int) -> int:
    """The ucs_status_t in an error pointer."""
    return ctypes.c_int8(pointer & 0xFF).value


_STATUS = ctypes.c_int8  # ucs_status_t is a packed enum: one byte
_SIZE = ctypes.c_size_t
_OPTIONS = ctypes.POINTER(RequestParams)
_HANDLE_OUT = ctypes.POINTER(Handle)
_SIGNATURES = {  # the result, then the arguments
    "ucp_ep_query": (_STATUS, Handle, Handle),  # its structure is query.py's
    "ucp_mem_map": (_STATUS, Handle, ctypes.POINTER(MapParams), _HANDLE_OUT),
    "ucp_mem_query": (_STATUS, Handle, ctypes.POINTER(MemAttr)),
    "ucp_mem_unmap": (_STATUS, Handle, Handle),
    "ucp_rkey_pack": (_STATUS, Handle, Handle, _HANDLE_OUT, ctypes.POINTER(_SIZE)),
    "ucp_rkey_buffer_release": (None, Handle),
    "ucp_ep_rkey_unpack": (_STATUS, Handle, ctypes.c_char_p, _HANDLE_OUT),
    "ucp_rkey_ptr": (_STATUS, Handle, ctypes.c_uint64, _HANDLE_OUT),
    "ucp_rkey_destroy": (None, Handle),
    "ucp_tag_send_nbx": (Handle, Handle, Handle, _SIZE, ctypes.c_uint64, _OPTIONS),
    "ucp_put_nbx": (Handle, Handle, Handle, _SIZE, ctypes.c_uint64, Handle, _OPTIONS),
    "ucp_ep_flush_nbx": (Handle, Handle, _OPTIONS),
    "ucp_request_check_status": (_STATUS, Handle),
    "ucp_request_free": (None, Handle),
}
_ucp: ctypes.CDLL | None = None  # loaded once, on first use
