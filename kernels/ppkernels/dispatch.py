"""The table that chooses the code of each operation: a kernel for CPUs, a kernel for GPUs or the
torch reference.

Device and type of the first tensor select the package, `cpu` or `gpu`. The row of the operation
then says whether the kernel takes tensors of this shape. A kernel's module is imported with its
first use: without a tensor on a GPU, Triton is never imported.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ppkernels import cpu, gpu
from ppkernels.cpu.vectors import takes_cache
from ppkernels.gpu import hopper_products

Code = TypeVar("Code", bound=Callable[..., Any])
Takes = Callable[..., bool]

MOST_ROWS = 1
"""Rows of the largest product of `few_rows`, but on Hopper cards. With more, a library is as fast."""
WIDEST = 32768
"""Inputs of the widest product of `few_rows`: registers hold whole rows of the weight."""


class Row(NamedTuple):
    """The kernels of one operation; None means that there is none for this device."""

    module: str
    """File name in `cpu/` and `gpu/`."""
    cpu: Takes | None
    """Whether the CPU kernel takes the tensors that `choose` gets."""
    gpu: Takes | None


def _whole(tensor: Tensor, *_: Tensor) -> bool:
    return tensor.is_contiguous()


def _second_whole(_: Tensor, second: Tensor) -> bool:
    return second.is_contiguous()


def _dense_rows(tensor: Tensor, *_: Tensor) -> bool:
    return tensor.stride(-1) == 1


def _normed_rows(*tensors: Tensor) -> bool:
    """Return whether each of `tensors` is [T, W] or [T, heads, W] with dense rows."""
    return all(each.dim() in (2, 3) and each.stride(-1) == 1 for each in tensors)


def _updated_rows(residual: Tensor, update: Tensor) -> bool:
    return residual.dim() == 2 and gpu.serves(update) and _normed_rows(residual, update)


def _few_rows(inputs: Tensor, weight: Tensor) -> bool:
    if hopper_products.serves(inputs, weight):
        return True
    rows, width = inputs.shape
    plain = inputs.stride(1) == 1 and weight.is_contiguous() and inputs.dtype == weight.dtype
    return 0 < rows <= MOST_ROWS and width <= WIDEST and plain


def _same_blocks(source: Tensor, target: Tensor) -> bool:
    """Return whether the blocks of both are of the same bytes, each in one run of memory of the host."""
    alike = target.is_cpu and source.dtype == target.dtype and source.shape[1:] == target.shape[1:]
    return alike and len(source) > 0 < len(target) and source[0].is_contiguous() and target[0].is_contiguous()


TABLE = {
    "silu_and_mul": Row("activation", cpu=lambda x: x.is_contiguous() and cpu.one_thread(), gpu=_dense_rows),
    "rms_norm": Row("norms", cpu=lambda x, weight: x.is_contiguous() and weight.dim() == 1,
                    gpu=lambda x, _: _normed_rows(x)),
    "layer_norm": Row("norms", cpu=None, gpu=_normed_rows),
    "add_rms_norm": Row("norms", cpu=None, gpu=_updated_rows),
    "add_layer_norm": Row("norms", cpu=None, gpu=_updated_rows),
    "rotate": Row("rotary", cpu=_whole, gpu=_whole),
    "store_kv": Row("store_kv", cpu=_second_whole, gpu=_second_whole),
    "rotate_and_store": Row("rotate_and_store", cpu=None, gpu=_second_whole),
    "paged_attention": Row("paged_attention", cpu=lambda kv, fused: takes_cache(kv) and fused.is_contiguous(),
                           gpu=_second_whole),
    "few_rows": Row("few_rows", cpu=None, gpu=_few_rows),
    "sample": Row("sampling", cpu=None, gpu=_dense_rows),
    "weighted_sum": Row("weighted_sum", cpu=None, gpu=_whole),
    "copy_run": Row("block_copy", cpu=_same_blocks, gpu=lambda source, target: source.device == target.device),
}  # fmt: skip


def choose(operation: str, reference: Code, *tensors: Tensor) -> Code:
    """Return the kernel of `operation` that takes `tensors`, otherwise `reference`. Both have the
    same parameters.
    """
    row, code = TABLE[operation], reference
    if row.gpu is not None and gpu.serves(tensors[0]):
        if row.gpu(*tensors):
            code = _load("gpu", row.module, operation)
    elif row.cpu is not None and cpu.serves(tensors[0]) and row.cpu(*tensors):
        code = _load("cpu", row.module, operation)
    return code


@functools.cache
def _load(device: str, module: str, operation: str) -> Any:
    return getattr(importlib.import_module(f"ppkernels.{device}.{module}"), operation)
