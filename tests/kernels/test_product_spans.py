"""Units of a product of few rows, divided over programs by the functions that the kernel compiles."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from ppkernels.gpu.hopper_products.spans import first_unit, place_of, program_of

sizes = st.integers(1, 3000), st.integers(1, 300), st.integers(1, 200)


@given(*sizes)
@example(64, 16, 132)
@example(2004, 64, 132)
@example(1, 3, 4)
def test_every_unit_is_added_once(tiles: int, pieces: int, most: int) -> None:
    """Each program, tile after tile, as `add_units` goes; what it writes is what the last one of the tile reads."""
    units = tiles * pieces
    programs = min(most, units)
    assert first_unit(0, units, programs) == 0 and first_unit(programs, units, programs) == units
    written: dict[int, tuple[int, int]] = {}
    parts: dict[int, list[int]] = {}
    whole = 0
    shares = set()
    for program in range(programs):
        unit, end = (first_unit(each, units, programs) for each in (program, program + 1))
        shares.add(end - unit)
        while unit < end:
            assert program_of(unit, units, programs) == program
            tile = unit // pieces
            stop = min(end, (tile + 1) * pieces)
            if stop - unit == pieces:
                whole += 1
            else:
                place = place_of(program, program - program_of(tile * pieces, units, programs))
                assert place not in written and 0 <= place < 2 * programs
                written[place] = unit, stop
                parts.setdefault(tile, []).append(program)
            unit = stop
    assert min(shares) > 0 and max(shares) - min(shares) <= 1
    assert whole + len(parts) == tiles
    for tile, contributors in parts.items():
        begin, end = tile * pieces, (tile + 1) * pieces
        first, last = (program_of(unit, units, programs) for unit in (begin, end - 1))
        assert contributors == list(range(first, last + 1)), "the last one to come counts them so, and resets the count"
        read = [written[place_of(program, program - first)] for program in contributors]
        assert [unit for one in read for unit in range(*one)] == list(range(begin, end)), "added in this order"
