"""KV map: every mapped device block by owner, folded into cells; the selected request's blocks are lit."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.inspection import BlocksDetail

from ppconsole.view.cells import Row, Seg, clip, fit, row, runs

GLYPHS: dict[str, tuple[str, str]] = {
    "free": ("·", "kv.free"),
    "cached": ("░", "kv.cached"),
    "used": ("■", "kv.used"),
    "shared": ("▓", "kv.shared"),
    "null": ("×", "kv.free"),
}
SELECTED = ("█", "kv.mine")
_WEIGHT = {"free": 0, "null": 1, "cached": 2, "used": 3, "shared": 4}


def cells(detail: BlocksDetail, size: int, selected: str | None = None) -> list[tuple[str, str]]:
    """Return one (glyph, style) a cell of `size` blocks. The selected request wins, then the fuller state."""
    count = -(-detail.mapped // size) if detail.mapped else 0
    weights = [-1] * count
    found = [GLYPHS["free"]] * count
    block = 0
    for length, code, owner in detail.runs:
        mine = selected is not None and owner == selected
        weight = 9 if mine else _WEIGHT.get(code, 1)
        for index in range(block // size, min(count, (block + length - 1) // size + 1)):
            if weight > weights[index]:
                weights[index], found[index] = weight, SELECTED if mine else GLYPHS.get(code, GLYPHS["null"])
        block += length
    return found


def rows(detail: BlocksDetail | None, width: int, height: int, selected: str | None = None) -> list[Row]:
    """Return header, map and legend in at most `height` rows."""
    if height < 3:
        return []
    if detail is None:
        return [row((fit(" KV MAP", width), ""), fill="head"), row((fit("  no block map yet", width), "dim"))]
    room = (width - 2) * (height - 2)
    size = max(1, -(-detail.mapped // max(1, room)))
    head = f" KV MAP  {detail.mapped} blocks, {size} a cell"
    lines = [row((fit(head, width), ""), fill="head")]
    found = cells(detail, size, selected)
    if size == 1 and 2 * detail.mapped <= room:  # with so much room a gap beside each block reads better
        found = [(f"{glyph} ", style) for glyph, style in found]
        lines.extend(_lines(found, (width - 2) // 2))
    else:
        lines.extend(_lines(found, width - 2))
    legend: list[Seg] = [(" ", "")]
    for name in ("used", "shared", "cached", "free"):
        glyph, style = GLYPHS[name]
        legend += [(glyph, style), (f" {name} ", "dim")]
    if selected:
        legend += [SELECTED, (f" {selected}", "dim")]
    return [*lines[: height - 1], clip(Row(tuple(legend)), width)]


def _lines(found: Sequence[tuple[str, str]], width: int) -> list[Row]:
    """Return the cells as rows of `width`."""
    return [
        Row(((" ", ""), *runs(found[first : first + width])))
        for first in range(0, len(found), width)
    ]  # fmt: skip
