"""The few calls of the CUDA driver that a stage's memory and edges need, each a method; a failure is one line.

torch's CUDA builds for Linux (2.11 and newer) bring cuda-bindings along; elsewhere it comes with
the extra `gpu`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from cuda.bindings import driver as cuda

from ppengine.stage.backends.cuda.errors import DriverError

_HANDLE_BYTES = 64


class Driver:
    """The driver on one device. Addresses are ints, sizes bytes, handles and streams the driver's.

    A thread calls `enter` once before anything else.
    """

    def __init__(self, device: int) -> None:
        self.device = torch.device("cuda", device)
        torch.cuda.set_device(self.device)
        self._context = _check("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(device))
        self.enter()
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device
        self._access = cuda.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        size = _check("cuMemGetAllocationGranularity", cuda.cuMemGetAllocationGranularity(self._properties, least))
        self.granularity = int(size)
        """Smallest piece of device memory; handles are multiples of it."""

    def enter(self) -> None:
        """Make the device's primary context, which torch uses too, the calling thread's: each thread has its own."""
        torch.cuda.set_device(self.device)
        _check("cuCtxSetCurrent", cuda.cuCtxSetCurrent(self._context))

    def free_bytes(self) -> int:
        """Return the free device memory."""
        free, _ = _check("cuMemGetInfo", cuda.cuMemGetInfo())
        return int(free)

    # --- device memory by handle ----------------------------------------------------------------------------

    def reserve(self, size: int) -> int:
        """Return the first of `size` bytes of addresses with nothing behind them."""
        call = f"cuMemAddressReserve of {size} bytes"
        return int(_check(call, cuda.cuMemAddressReserve(size, self.granularity, 0, 0)))

    def free_addresses(self, address: int, size: int) -> None:
        """Give reserved addresses back; nothing may be mapped there."""
        _check("cuMemAddressFree", cuda.cuMemAddressFree(address, size))

    def create(self, size: int) -> Any:
        """Return a handle of `size` bytes of device memory."""
        return _check(f"cuMemCreate of {size} bytes", cuda.cuMemCreate(size, self._properties, 0))

    def release(self, handle: Any) -> None:
        """Drop a handle. Its memory is free when it is mapped nowhere."""
        _check("cuMemRelease", cuda.cuMemRelease(handle))

    def map(self, address: int, size: int, handle: Any) -> None:
        """Put a handle's memory, all of it, at `address`."""
        _check("cuMemMap", cuda.cuMemMap(address, size, 0, handle, 0))

    def set_access(self, address: int, size: int) -> None:
        """Let the device read and write mapped memory there; any number of handles."""
        _check("cuMemSetAccess", cuda.cuMemSetAccess(address, size, [self._access], 1))

    def unmap(self, address: int, size: int) -> None:
        """Unmap whole handles. Nothing on the device may be using them."""
        _check("cuMemUnmap", cuda.cuMemUnmap(address, size))

    def zero(self, address: int, size: int, stream: int) -> None:
        """Fill with zeros, on a stream; both are multiples of 4."""
        _check("cuMemsetD32Async", cuda.cuMemsetD32Async(address, 0, size // 4, stream))

    # --- memory that another process writes -----------------------------------------------------------------

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes of device memory, zeroed, that other processes can be let into."""
        address = int(_check(f"cuMemAlloc of {size} bytes", cuda.cuMemAlloc(size)))
        _check("cuMemsetD8", cuda.cuMemsetD8(address, 0, size))
        return address

    def export(self, address: int) -> bytes:
        """Return the handle [64] by which another process of this host opens what `allocate` gave."""
        handle = _check("cuIpcGetMemHandle", cuda.cuIpcGetMemHandle(address))
        return ctypes.string_at(int(handle.getPtr()), _HANDLE_BYTES)

    def open(self, exported: bytes) -> int:
        """Return the address here of another process's memory, on this card or one that this one can reach."""
        handle = cuda.CUipcMemHandle()
        ctypes.memmove(int(handle.getPtr()), exported, _HANDLE_BYTES)
        lazily = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(_check("cuIpcOpenMemHandle", cuda.cuIpcOpenMemHandle(handle, lazily.value)))

    def shut(self, address: int) -> None:
        """Undo `open`. Nothing on the device may be using it."""
        _check("cuIpcCloseMemHandle", cuda.cuIpcCloseMemHandle(address))

    # --- words in host memory that devices write and wait for -------------------------------------------------

    def show(self, address: int, size: int) -> int:
        """Lock host memory in place, whole pages of it, as `pin`, and return its address on the device."""
        mapped = cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        _check(f"cuMemHostRegister of {size} bytes", cuda.cuMemHostRegister(address, size, mapped))
        return int(_check("cuMemHostGetDevicePointer", cuda.cuMemHostGetDevicePointer(address, 0)))

    def wait_for(self, word: int, value: int, stream: int) -> None:
        """Let all later work on the stream wait until the word (u64) is `value` or more."""
        _check("cuStreamWaitValue64", cuda.cuStreamWaitValue64(stream, word, value, 0))

    def write_word(self, word: int, value: int, stream: int) -> None:
        """Write a word (u64) once all before it on the stream is done, and visible to every reader of the word."""
        _check("cuStreamWriteValue64", cuda.cuStreamWriteValue64(stream, word, value, 0))

    # --- host memory and copies -----------------------------------------------------------------------------

    def pin(self, address: int, size: int) -> None:
        """Lock host memory in place so that the device can copy to and from it."""
        _check(f"cuMemHostRegister of {size} bytes", cuda.cuMemHostRegister(address, size, 0))

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        _check("cuMemHostUnregister", cuda.cuMemHostUnregister(address))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy within the device, or to what `open` gave, on a stream."""
        _check("cuMemcpyDtoDAsync", cuda.cuMemcpyDtoDAsync(target, source, size, stream))

    def to_host(self, host: int, device: int, size: int, stream: int) -> None:
        """Copy from the device, on a stream. One copy stays within one `pin`."""
        _check("cuMemcpyDtoHAsync", cuda.cuMemcpyDtoHAsync(host, device, size, stream))

    def to_device(self, device: int, host: int, size: int, stream: int) -> None:
        """Copy to the device, on a stream. One copy stays within one `pin`."""
        _check("cuMemcpyHtoDAsync", cuda.cuMemcpyHtoDAsync(device, host, size, stream))


def _check(call: str, answer: tuple[Any, ...]) -> Any:
    """Return the values of a call of the bindings; raise DriverError for any status but success."""
    status, *values = answer
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise DriverError(call, status.name)
    return values[0] if len(values) == 1 else tuple(values)
