"""Fill a stage's parameters: from safetensors files, or with numbers that depend on tensor names alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppengine.checkpoint.config_json import CheckpointError
from ppengine.checkpoint.tensor_files import WEIGHT_DTYPES, tensor_files
from ppengine.models.layers import Source
from ppengine.models.stage_model import StageModel

DUMMY_SCALE = 0.05
"""Standard deviation of dummy weights; those of norms are beside 1."""
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_weights(model: StageModel, folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Read the tensors of this stage's layers, and only those, from the checkpoint in `folder`.

    A tensor that is split over ranks is read in this rank's part alone. `progress` is called with tensors read and
    tensors in all. Raises CheckpointError naming tensor, file and shapes if a tensor is missing or of another shape,
    and if a head that is tied to the embedding has other numbers.
    """
    with _Checkpoint(folder) as checkpoint, torch.no_grad():
        for number, source in enumerate(model.sources, 1):
            tensor = checkpoint.read(source)
            source.target.copy_(source.arranged(tensor))
            if model.last and model.spec.tie_word_embeddings and source.name.endswith(_EMBEDDING):
                checkpoint.check_tied(source, tensor)
            if progress is not None:
                progress(number, len(model.sources))


def init_dummy(model: StageModel, seed: int) -> None:
    """Fill the parameters with small random numbers, the same for a tensor however the model is cut.

    A GPU draws its own, others than a CPU's: drawing those of an 8B model takes a CPU a minute.
    """
    with torch.no_grad():
        for source in model.sources:
            name, device = source.name, source.target.device
            # One hash of both: the generator looks at 32 bits of its seed alone.
            generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            # The whole tensor: a number depends on all that were drawn before it.
            whole = torch.randn(source.shape, generator=generator, dtype=torch.float32, device=device)
            values = whole[source.index].mul_(DUMMY_SCALE)
            if "norm" in name and name.endswith("weight"):
                values.add_(1.0)
            source.target.copy_(source.arranged(values))


class _Checkpoint:
    """The safetensors files of a folder, each opened at its first tensor. Raises CheckpointError."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, tensor_files(folder)
        self._opened: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, source: Source) -> Tensor:
        """Return the part of a tensor that `source` takes."""
        stored = _stored_name(source.name, self._files)
        if stored is None:
            held = ", ".join(sorted({path.name for path in self._files.values()}))
            name = f"{source.name} {list(source.shape)}"
            raise CheckpointError(f"{self._folder}: tensor {name} is in none of its files ({held})")
        path = self._files[stored]
        try:
            if path not in self._opened:
                self._opened[path] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            tensor, shape = _read(self._opened[path], stored, source)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: tensor {stored}: {' '.join(str(error).split())}") from None
        if tensor.dtype not in _WEIGHT_DTYPES:
            works = ", ".join(WEIGHT_DTYPES)
            raise CheckpointError(f"{path}: tensor {stored} is {tensor.dtype}; its type must be one of {works}")
        if shape != source.shape:
            made = list(source.shape)
            raise CheckpointError(f"{path}: tensor {stored} is {list(shape)}; config.json makes it {made}")
        return tensor

    def check_tied(self, source: Source, embedding: Tensor) -> None:
        """Raise CheckpointError if there is a head with other numbers than the `embedding` that takes its place."""
        if _HEAD not in self._files:
            return
        head, dtype = self.read(replace(source, name=_HEAD)), source.target.dtype
        if not torch.equal(head.to(dtype), embedding.to(dtype)):
            raise CheckpointError(
                f"{self._files[_HEAD]}: {_HEAD} differs from {source.name}, and config.json ties both: "
                f"set tie_word_embeddings to false there, or remove the tensor"
            )


def _read(file: Any, stored: str, source: Source) -> tuple[Tensor, tuple[int, ...]]:
    """Return the part of the tensor `stored` that `source` takes, and the shape of all of it.

    If the shape is not that of `source`, the part has a number at most.
    """
    if source.is_whole:
        tensor: Tensor = file.get_tensor(stored)
        return tensor, tuple(tensor.shape)
    whole = file.get_slice(stored)
    shape = tuple(whole.get_shape())
    return whole[source.index if shape == source.shape else (slice(0, 0),) * min(len(shape), 1)], shape


def _stored_name(name: str, files: dict[str, Path]) -> str | None:
    """Return `name` as the checkpoint has it: checkpoints of the bare model leave out the first `model.`."""
    return next((found for found in (name, name.removeprefix("model.")) if found in files), None)
