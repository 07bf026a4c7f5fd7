"""The requests that hold most blocks of a stage. A block spans all layers: each stage holds its part of every block."""

from __future__ import annotations

from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.stage_info import StageInfo

from ppconsole.model.units import bytes_text, count_text
from ppconsole.view.cells import FLEX, Column, Row, fit, header, place, row, table_row
from ppconsole.view.marks import request_mark
from ppconsole.view.wording import REQUEST

MOST = 5
COLUMNS = (
    Column("id", REQUEST["id"], 10, 0, grow=8),
    Column("owner", REQUEST["owner"], 8, 3, grow=6),
    Column("state", REQUEST["state"], 5, 2),
    Column("blk", REQUEST["blk"], 6, 0, ">"),
    Column("bytes", "HERE", 6, 1, ">"),
    Column("rest", "", 1, 4, grow=FLEX),
)


def rows(snapshot: Snapshot, stage: StageInfo, width: int) -> list[Row]:
    """Return the requests with most blocks, the most first, and how many more hold some."""
    holders = sorted((each for each in snapshot.requests if each.blocks), key=lambda each: -each.blocks)
    title = " REQUESTS BY BLOCKS  as many on every stage; HERE: bytes on this one"
    found = [row((fit(title, width), ""), fill="head")]
    if not holders:
        return [*found, row(("  no request holds blocks", "dim"))]
    memory, blocks = stage.memory, stage.kv_blocks
    size = memory.kv_mapped / blocks.mapped if memory.kv_mapped and blocks.mapped else None
    placed = place(COLUMNS, width - 2)
    titles = header(placed, fill="")
    found.append(Row((("  ", ""), *((text, "dim") for text, _ in titles.segs))))
    for request in holders[:MOST]:
        mark = request_mark(request.state)
        cells = {
            "id": (request.id, "strong"), "owner": (request.owner, "dim"), "state": (mark.text, mark.style),
            "blk": (count_text(request.blocks), ""), "rest": ("", ""),
            "bytes": (bytes_text(None if size is None else request.blocks * size), ""),
        }  # fmt: skip
        found.append(Row((("  ", ""), *table_row(placed, cells).segs)))
    if (more := len(holders) - MOST) > 0:
        found.append(row((fit(f"  and {more} more; S b sorts all of them on the main screen", width), "dim")))
    return found
