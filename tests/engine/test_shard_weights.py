"""Weights of a rank: its rows and columns alone are read, and dummy numbers do not depend on the cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from ppengine.checkpoint.model_shard import shard_of
from ppengine.checkpoint.model_spec import CheckpointError, read_spec
from ppengine.models import StageModel, build_stage, init_dummy, load_weights, loader
from ppengine.models.layers import Source
from safetensors.torch import load_file, save_file
from thread_group import Meeting, ThreadGroup
from torch import Tensor

SPLIT = {
    "q_proj.weight": 0, "k_proj.weight": 0, "v_proj.weight": 0, "q_proj.bias": 0, "k_proj.bias": 0, "v_proj.bias": 0,
    "o_proj.weight": 1, "out_proj.weight": 1, "gate_proj.weight": 0, "up_proj.weight": 0,
    "gate_up_proj.weight": 0, "down_proj.weight": 1,
    "fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1, "embed_tokens.weight": 0, "lm_head.weight": 0,
}  # fmt: skip
"""Tensors that are split, with their dimension; every rank has all of the others."""
RANKS = 4


def ranks_of(folder: Path, size: int = RANKS, dtype: torch.dtype = torch.float32) -> list[StageModel]:
    """Return the whole model's stage on each rank."""
    spec, meeting = read_spec(folder), Meeting(size)
    groups = [ThreadGroup(meeting, rank) for rank in range(size)]
    layers = (0, spec.num_layers)
    return [
        build_stage(spec, layers, True, True, dtype, shard=shard_of(spec, group.rank, size), group=group)
        for group in groups
    ]


def dimension_of(name: str) -> int | None:
    """Return the dimension that a tensor is split in; None if it is not."""
    return next((dimension for end, dimension in SPLIT.items() if f".{name}".endswith(f".{end}")), None)


def by_name(model: StageModel) -> dict[str, list[Source]]:
    """Return the sources of `model`; a tensor may have several."""
    found: dict[str, list[Source]] = {}
    for source in model.sources:
        found.setdefault(source.name, []).append(source)
    return found


def put_back(sources: list[Source]) -> Tensor:
    """Return a checkpoint's tensor as the targets of its sources have it; NaN where none of them has a part."""
    tensor = torch.full(sources[0].shape, float("nan"))
    for source in sources:
        # The numbers of the rows, arranged as the target has them.
        rows = source.arranged(torch.arange(source.shape[0])[source.index[0]])
        tensor[(rows, *source.index[1:])] = source.target
    return tensor


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_side_by_side_are_the_checkpoint(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, layers=1, vocab_size=131)
    spec, ranks = read_spec(folder), ranks_of(folder)
    for model in ranks:
        load_weights(model, folder)
        assert model.weights_bytes == sum(source.target.nbytes for source in model.sources)
    for name, tensor in load_file(folder / "model.safetensors").items():
        sources = [by_name(model)[name] for model in ranks]
        assert torch.equal(put_back([source for each in sources for source in each]), tensor), name
        sizes = [sum(source.target.numel() for source in each) for each in sources]
        if dimension_of(name) is None:
            assert sizes == [tensor.numel()] * RANKS
        else:
            copies = RANKS // spec.num_kv_heads if ".k_proj." in name or ".v_proj." in name else 1
            assert sum(sizes) == copies * tensor.numel()
            assert max(sizes) < tensor.numel()


def test_a_rank_reads_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", layers=1)
    real, whole, taken = loader.safe_open, [], {}

    class Opened:
        def __init__(self, path: Path, **options: str) -> None:
            self._file = real(path, **options)

        def __enter__(self) -> Opened:
            self._inner = self._file.__enter__()
            return self

        def __exit__(self, *exit_info: object) -> None:
            self._file.__exit__(*exit_info)

        def get_tensor(self, name: str) -> Tensor:
            whole.append(name)
            return self._inner.get_tensor(name)

        def get_slice(self, name: str) -> Any:
            inner = self._inner.get_slice(name)

            class Sliced:
                def get_shape(self) -> list[int]:
                    return inner.get_shape()

                def __getitem__(self, index: Any) -> Tensor:
                    taken[name] = inner[index]
                    return taken[name]

            return Sliced()

    model = ranks_of(folder)[1]
    monkeypatch.setattr(loader, "safe_open", Opened)
    load_weights(model, folder)
    sources = by_name(model)
    assert all(dimension_of(name) is None for name in whole)
    assert {name: tensor.shape for name, tensor in taken.items()} == {
        name: source.target.shape for name, (source,) in sources.items() if dimension_of(name) is not None
    }
    assert len(whole) + len(taken) == len(sources)


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_numbers_do_not_depend_on_the_ranks(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, layers=1)
    (whole,) = ranks_of(folder, 1)
    init_dummy(whole, 3)
    for model in ranks_of(folder):
        init_dummy(model, 3)
        for name, sources in by_name(model).items():
            part = put_back(sources)
            same = (part == put_back(by_name(whole)[name])) | part.isnan()
            assert same.all() and not part.isnan().all(), name


@pytest.mark.parametrize("name", ["self_attn.o_proj", "self_attn.q_proj", "mlp.down_proj"])
def test_a_misshapen_tensor_is_named_with_its_whole_shape(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", layers=1)
    file, key = folder / "model.safetensors", f"model.layers.0.{name}.weight"
    tensors = load_file(file)
    shape = list(tensors[key].shape)
    wider = torch.zeros(shape[0], shape[1] + 8)
    for wrong in (wider, wider.flatten(), torch.zeros(0), torch.zeros(())):
        save_file({**tensors, key: wrong}, file)
        with pytest.raises(CheckpointError) as caught:
            load_weights(ranks_of(folder)[1], folder)
        assert str(caught.value) == f"{file}: tensor {key} is {list(wrong.shape)}; config.json makes it {shape}"
    save_file({each: tensor for each, tensor in tensors.items() if each != key}, file)
    with pytest.raises(CheckpointError) as caught:
        load_weights(ranks_of(folder)[1], folder)
    assert f"tensor {key} {shape} is in none of its files" in str(caught.value)


def test_a_split_tensor_of_another_type_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", layers=1)
    file, key = folder / "model.safetensors", "model.layers.0.self_attn.o_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, key: tensors[key].to(torch.int8)}, file)
    with pytest.raises(CheckpointError, match=r"o_proj.weight is torch\.int8; its type must be one of F64"):
        load_weights(ranks_of(folder)[1], folder)


def test_a_shard_belongs_to_its_group(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "llama", layers=1))
    with pytest.raises(ValueError, match="shard 1 of 2 for rank 0 of 1"):
        build_stage(spec, (0, 1), True, True, torch.float32, shard=shard_of(spec, 1, 2))
