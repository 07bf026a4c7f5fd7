"""A layer in one call against the same layer made of torch's operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from batches import Paged, make_paged
from ppkernels.activation import silu_and_mul_reference
from ppkernels.attention_plan import AttentionPlan
from ppkernels.cpu.linear import pack
from ppkernels.cpu.llama_layer import BAD_SLOT, DONE, LayerWeights, Rows, absent, llama_layer
from ppkernels.norms import rms_norm_reference
from ppkernels.paged_attention import paged_attention_reference
from ppkernels.rotary import rotary_tables, rotate_reference
from ppkernels.store_kv import store_kv_reference
from torch import Tensor

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4}
HEADS, KV_HEADS, WIDTH, HIDDEN, INNER = 6, 2, 16, 48, 64
EPS = 1e-5
STEPS = {
    "decodes": [(4, 1), (0, 1), (31, 1), (16, 1), (15, 1), (99, 1)],
    "chunks": [(16, 16), (3, 5), (0, 40)],
    "mixed": [(4, 1), (0, 11), (31, 1), (5, 7)],
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case:
    """A layer, a step and a cache; the plain weights are kept for the reference."""

    def __init__(self, step: str, dtype: torch.dtype, optional: bool) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3).to(dtype)

        self.paged: Paged = make_paged(STEPS[step], KV_HEADS, WIDTH, dtype, block_size=16)
        fused = (HEADS + 2 * KV_HEADS) * WIDTH
        self.weights = {
            "input_norm": draw(HIDDEN), "mlp_norm": draw(HIDDEN), "qkv": draw(fused, HIDDEN),
            "out": draw(HIDDEN, HEADS * WIDTH), "gate_up": draw(2 * INNER, HIDDEN), "down": draw(HIDDEN, INNER),
        }  # fmt: skip
        some = {"qkv_bias": fused, "out_bias": HIDDEN, "gate_up_bias": 2 * INNER, "down_bias": HIDDEN,
                "q_norm": WIDTH, "k_norm": WIDTH, "out_norm": HIDDEN, "down_norm": HIDDEN}  # fmt: skip
        self.weights |= {name: draw(size) if optional else None for name, size in some.items()}
        self.cos, self.sin = rotary_tables(torch.rand(WIDTH // 2, generator=generator), 128, 1.0, dtype)
        self.hidden = draw(len(self.paged.batch.positions), HIDDEN)

    def run(self) -> tuple[int, Tensor]:
        """Return what the kernel says, and the residual stream behind the layer."""
        batch, residual = self.paged.batch, self.hidden.clone()
        given = {name: value for name, value in self.weights.items() if value is not None}
        arrays = dict.fromkeys(self.weights, absent(residual.numpy()))
        arrays |= {n: (pack(value.clone()) if value.dim() == 2 else value).numpy() for n, value in given.items()}
        tensors = (self.cos, self.sin, batch.positions, batch.slot_mapping, batch.query_start[:-1],
                   batch.query_start[1:], batch.seq_lens, batch.block_tables)  # fmt: skip
        rows = Rows(*(tensor.numpy() for tensor in tensors))
        kv = self.paged.kv.numpy()
        return llama_layer(residual.numpy(), LayerWeights(**arrays), kv, rows, HEADS, EPS), residual

    def reference(self) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the cache behind the layer."""
        weights, batch, kv = self.weights, self.paged.batch, self.paged.kv.clone()

        def linear(x: Tensor, name: str) -> Tensor:
            return torch.nn.functional.linear(x, weights[name], weights[f"{name}_bias"])

        def output(x: Tensor, name: str) -> Tensor:
            norm, y = weights[f"{name}_norm"], linear(x, name)
            return y if norm is None else rms_norm_reference(y, norm, EPS)

        both = HEADS + KV_HEADS
        fused = linear(rms_norm_reference(self.hidden, weights["input_norm"], EPS), "qkv").view(
            len(self.hidden), -1, WIDTH
        )
        if weights["q_norm"] is not None:
            fused[:, :HEADS] = rms_norm_reference(fused[:, :HEADS], weights["q_norm"], EPS)
            fused[:, HEADS:both] = rms_norm_reference(fused[:, HEADS:both], weights["k_norm"], EPS)
        rotate_reference(fused, both, self.cos, self.sin, batch.positions)
        store_kv_reference(kv, fused, batch.slot_mapping)
        plan = AttentionPlan(batch, HEADS, fused.dtype)
        hidden = self.hidden + output(paged_attention_reference(fused, kv, plan), "out")
        gate_up = linear(rms_norm_reference(hidden, weights["mlp_norm"], EPS), "gate_up")
        return hidden + output(silu_and_mul_reference(gate_up), "down"), kv


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("optional", [False, True], ids=["plain", "biases and norms"])
def test_equals_the_operations_one_by_one(dtype: torch.dtype, step: str, optional: bool) -> None:
    case = Case(step, dtype, optional)
    expected, kv = case.reference()
    done, residual = case.run()
    assert done == DONE
    torch.testing.assert_close(residual, expected, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(case.paged.kv, kv, rtol=0, atol=TOLERANCE[dtype], equal_nan=True)


def test_nan_stays_in_its_sequence() -> None:
    case = Case("mixed", torch.float32, False)
    case.hidden[3, 7] = float("nan")
    expected, _ = case.reference()
    _, residual = case.run()
    assert torch.equal(residual.isnan(), expected.isnan())
    assert residual[3].isnan().all() and not residual[:1].isnan().any() and not residual[-8:].isnan().any()


def test_bad_indices_are_told_before_anything_is_written() -> None:
    case = Case("decodes", torch.float32, False)
    before = case.paged.kv.clone()
    case.paged.batch.block_tables[2, 1] = len(before)
    done, residual = case.run()
    assert done == 2 and torch.equal(residual, case.hidden)
    case.paged.batch.block_tables[2, 1] = 0
    case.paged.batch.slot_mapping[1] = -1
    done, residual = case.run()
    assert done == BAD_SLOT and torch.equal(residual, case.hidden)
    torch.testing.assert_close(case.paged.kv, before, rtol=0, atol=0, equal_nan=True)


def test_absent_weights_need_no_further_version() -> None:
    Case("decodes", torch.float32, False).run()
    versions = set(llama_layer.signatures)
    Case("decodes", torch.float32, True).run()
    assert set(llama_layer.signatures) == versions
