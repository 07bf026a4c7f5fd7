"""The options of prompts, as rows."""

from __future__ import annotations

from ppconsole.model.prompt_options import FORM, PromptOptions
from ppconsole.view.cells import EMPTY, FLEX, Column, Row, clip, header, place, row, table_row
from ppconsole.view.drilldown import heading

COLUMNS = (
    Column("name", "OPTION", 15, 0),
    Column("value", "VALUE", 12, 0, grow=8),
    Column("default", "DEFAULT", 9, 1),
    Column("help", "MEANING", 20, 2, grow=FLEX),
)


def rows(options: PromptOptions, width: int) -> list[Row]:
    """Return every option of a prompt with its value; those that differ from their default are marked by colour."""
    placed = place(COLUMNS, width - 2)
    titles = header(placed)
    lines = [heading("OPTIONS OF PROMPTS  i and :submit use them", width), Row((("  ", ""), *titles.segs), "head")]
    for each in options.rows():
        style = "accent" if each.changed else ""
        cells = {
            "name": (each.name, "strong"), "value": (each.value, style), "default": (each.default, "dim"),
            "help": (each.help, "dim"),
        }  # fmt: skip
        lines.append(Row((("* " if each.changed else "  ", style), *table_row(placed, cells).segs)))
    return [*lines, EMPTY, clip(row((f"  :{FORM}", "key"), ("   they are kept for the next start", "dim")), width)]
