"""Folded masks have the bits of the whole ones, and as few bytes as possible."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from ppengine.grammar.mask_folding import fold

shapes = st.tuples(st.integers(1, 6), st.integers(1, 40))
words = st.one_of(st.just(0), st.just(0), st.integers(-(2**31), 2**31 - 1))


@given(masks=shapes.flatmap(lambda shape: arrays.arrays(np.int32, shape, elements=words)))
def test_folded_masks_are_the_whole_ones(masks: np.ndarray) -> None:
    counts, folded = fold(masks)
    assert counts == [sum(int(word & 0xFFFFFFFF).bit_count() for word in mask.tolist()) for mask in masks]
    assert len(folded) == len(masks)
    for mask, (content, places) in zip(masks, folded, strict=True):
        whole = np.frombuffer(content, "<i4")
        if places:
            found = np.zeros_like(mask)
            found[np.frombuffer(places, "<i4")] = whole
            assert len(content) + len(places) < 4 * len(mask) and whole.all()
        else:
            found = whole if content else np.zeros_like(mask)
        assert np.array_equal(found, mask)
