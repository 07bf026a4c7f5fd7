"""A tensor over memory that torch did not allocate, by the DLPack protocol.

torch does not check the address, so a part of it may have no memory behind it, as long as nothing
touches it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_CPU, _CUDA = 1, 2
_UINT = 1


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_kept: list[_Managed] = []
"""torch reads its description again when the last view goes, maybe while the interpreter ends: it stays for good."""


def tensor_over(address: int, size: int, device: torch.device) -> Tensor:
    """Return a uint8 tensor `[size]` over memory at `address` of `device`, which the caller keeps while it is used."""
    where = _Device(_CUDA, device.index or 0) if device.type == "cuda" else _Device(_CPU, 0)
    shape = (ctypes.c_int64 * 1)(size)
    managed = _Managed(_Tensor(address, where, 1, _DataType(_UINT, 8, 1), shape, None, 0), None, None)
    _kept.append(managed)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    tensor: Tensor = torch.utils.dlpack.from_dlpack(new_capsule(ctypes.addressof(managed), b"dltensor", None))
    return tensor
