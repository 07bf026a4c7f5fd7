"""Weights: each stage reads its own tensors alone, and what is missing or broken is named in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from ppengine.checkpoint.model_spec import CheckpointError, check_weights, read_spec
from ppengine.checkpoint.tensor_files import tensor_files
from ppengine.common.partition import partition_layers
from ppengine.models import StageModel, build_stage, init_dummy, load_weights, loader
from safetensors.torch import load_file, save_file
from stage_runs import Pipeline, exact_logits, random_tokens


class Recorder:
    """Stands in front of `safe_open` and writes down which tensors are read from where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        self.opened: list[str] = []
        real = loader.safe_open
        recorder = self

        class Opened:
            def __init__(self, path: Path, **options: str) -> None:
                recorder.opened.append(path.name)
                self._file = real(path, **options)

            def __enter__(self) -> Opened:
                self._inner = self._file.__enter__()
                return self

            def __exit__(self, *exit_info: object) -> None:
                self._file.__exit__(*exit_info)

            def get_tensor(self, name: str) -> torch.Tensor:
                recorder.read.append(name)
                return self._inner.get_tensor(name)

        monkeypatch.setattr(loader, "safe_open", Opened)


def stages_of(folder: Path, count: int, dtype: torch.dtype = torch.float32) -> list[StageModel]:
    spec = read_spec(folder)
    cuts = partition_layers(spec.num_layers, count)
    return [build_stage(spec, cut, cut[0] == 0, cut[1] == spec.num_layers, dtype) for cut in cuts]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_reads_its_own_tensors_alone(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, family, shards=3)
    spec = read_spec(folder)
    everything = set(tensor_files(folder))
    ends = ("embed", "project", "norm.", "lm_head", "final_layer_norm.")
    seen: list[str] = []
    for index, stage in enumerate(stages_of(folder, 3)):
        recorder = Recorder(monkeypatch)
        load_weights(stage, folder)
        assert len(recorder.read) == len(set(recorder.read)), "no tensor is read twice"
        assert len(recorder.opened) == len(set(recorder.opened)) <= 3
        start, end = stage.layer_range
        for name in recorder.read:
            if ".layers." in name:
                assert start <= int(name.split(".layers.")[1].split(".")[0]) < end
            else:
                assert index != 1, f"the middle stage reads {name}"
                assert any(part in name for part in ends)
        embeds = any("embed_tokens" in name for name in recorder.read)
        assert embeds == (index == 0 or (index == 2 and spec.tie_word_embeddings))
        seen += recorder.read
        monkeypatch.undo()
    assert set(seen) == everything
    tied = [name for name in seen if seen.count(name) > 1]
    assert all("embed_tokens" in name for name in tied)


@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
def test_sharded_and_bare_checkpoints_hold_the_same(family: str, tmp_path: Path) -> None:
    tokens = random_tokens(20, 128)
    single = make_checkpoint(tmp_path / "single", family, dtype="float64")
    sharded = make_checkpoint(tmp_path / "sharded", family, dtype="float64", shards=4)
    assert [path.name for path in check_weights(single)] == ["model.safetensors"]
    assert len(check_weights(sharded)) == 4
    bare = make_checkpoint(tmp_path / "bare", family, dtype="float64")
    file = bare / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    expected = exact_logits(single, tokens, torch.float64)
    for folder in (single, sharded, bare):
        pipeline = Pipeline(folder, torch.float64, 2)
        pipeline.add(0, tokens)
        torch.testing.assert_close(pipeline.step((0, 0, 20)), expected, rtol=0, atol=1e-9)


def test_weights_bytes_count_what_the_stage_holds(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")
    sizes = {name: tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items()}
    whole = stages_of(folder, 1)[0]
    assert whole.weights_bytes == 4 * sum(sizes.values())
    assert whole.weights_bytes == sum(source.target.nbytes for source in whole.sources)
    first, last = stages_of(folder, 2, torch.bfloat16)
    embedding = sizes["model.embed_tokens.weight"]
    assert first.weights_bytes + last.weights_bytes == 2 * (sum(sizes.values()) + embedding)
    assert first.boundary_size == 32


def test_a_stage_does_only_what_it_has(tmp_path: Path) -> None:
    for family in ("opt", "llama"):
        first, last = stages_of(make_checkpoint(tmp_path / family, family), 2)
        with pytest.raises(RuntimeError, match="only the first stage"):
            last.embed(torch.tensor([1]), torch.tensor([0]))
        with pytest.raises(RuntimeError, match="only the last stage"):
            first.logits(torch.zeros(1, 32))


@pytest.mark.parametrize("family", ["opt", "qwen2"])
def test_a_tied_head_with_other_numbers_is_refused(family: str, tmp_path: Path) -> None:
    """transformers takes the head then; without a word, other tokens than there would come."""
    folder = make_checkpoint(tmp_path, family, tie_word_embeddings=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    save_file({**tensors, "lm_head.weight": tensors[name].clone()}, file)
    for stage in stages_of(folder, 2):
        load_weights(stage, folder)
    save_file({**tensors, "lm_head.weight": tensors[name] + 1.0}, file)
    first, last = stages_of(folder, 2)
    load_weights(first, folder)
    for stage in (last, *stages_of(folder, 1)):
        with pytest.raises(CheckpointError, match=rf"lm_head\.weight differs from {name}, and config\.json ties both"):
            load_weights(stage, folder)


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    stage = stages_of(folder, 1)[0]
    calls: list[tuple[int, int]] = []
    load_weights(stage, folder, lambda done, total: calls.append((done, total)))
    assert calls == [(done, len(stage.sources)) for done in range(1, len(stage.sources) + 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_are_the_same_for_every_cut(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    whole = stages_of(folder, 1)[0]
    init_dummy(whole, 3)
    values = {source.name: source.target for source in whole.sources}
    assert all(bool(value.isfinite().all()) for value in values.values())
    for stage in stages_of(folder, 3):
        init_dummy(stage, 3)
        for source in stage.sources:
            assert torch.equal(source.target, values[source.name]), source.name
    other = stages_of(folder, 1)[0]
    init_dummy(other, 4)
    assert not torch.equal(other.sources[0].target, whole.sources[0].target)


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.2.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name][:, :8].contiguous()}, file)
    first, last = stages_of(folder, 2)
    load_weights(first, folder)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .*2.*k_proj.* is \[16, 8\]; .* \[16, 32\]"):
        load_weights(last, folder)
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=r"tensor .*2.*k_proj.* \[16, 32\] is in none of its files"):
        load_weights(last, folder)


def test_a_truncated_file_is_named_with_its_sizes(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", shards=2)
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    for keep in (len(whole) - 1, len(whole) // 2, 100, 9, 8, 3, 0):
        shard.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match=rf"{shard.name}: .*{keep} bytes") as caught:
            check_weights(folder)
        assert "\n" not in str(caught.value)
    shard.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="too long"):
        check_weights(folder)
    shard.write_bytes(len(b'{"a": 1}').to_bytes(8, "little") + b'{"a": 1}')
    with pytest.raises(CheckpointError, match="header is broken"):
        check_weights(folder)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", shards=3)
    index = folder / "model.safetensors.index.json"
    shards = check_weights(folder)
    shards[2].unlink()
    with pytest.raises(CheckpointError, match=f"1 of 3 shards missing, the first is {shards[2].name}"):
        check_weights(folder)
    text = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(text["weight_map"], "../secret.safetensors")}))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        check_weights(folder)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="broken index"):
        check_weights(folder)
    index.unlink()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no weights; expected model\.safetensors"):
        check_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match="pickled weights are not read; convert to safetensors"):
        check_weights(folder)
