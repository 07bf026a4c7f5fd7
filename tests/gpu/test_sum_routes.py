"""The ways of sums that a rank on a card reports are those that its kernels take."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which has no macOS build")
pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings (extra gpu)")

from ppengine.stage.backends.cuda.card_group import routes
from ppkernels.gpu import collectives


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kib", [8, 512, 520, 1016, 1024, 1032, 16376, 16384, 65536])
def test_the_first_way_that_a_part_fits_is_taken(size: int, kib: int) -> None:
    part = torch.empty(kib, 512, dtype=torch.bfloat16, device="meta")
    way = next(each.way for each in routes(size) if each.most_bytes is None or part.nbytes <= each.most_bytes)
    assert ("own flag" in way) == (part.nbytes <= collectives.WORD_BYTES)
    assert way.startswith("one shot") != collectives.in_two_shots(part, size)
    assert [each.most_bytes for each in routes(size)][-2:] == [None, None]
    assert f"from {1024 * size:,} tokens and 16.0 MiB on" in routes(size)[-2].way
