"""Record a command at 80x24 as an asciicast (version 2) and as a GIF, for the README.

    python docs/pictures/cast.py docs/pictures/tour ppconsole tour --auto

The console draws ten times a second; a reader needs one picture a second. So a terminal in memory takes the output,
and the cast has the cells that changed since the last picture. `pip install -c constraints.txt .[pictures]` has both
libraries; the font is DejaVu Sans Mono (Debian: fonts-dejavu-core).
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pyte
from PIL import Image, ImageDraw, ImageFont

COLUMNS, LINES = 80, 24
FRAME_S = 1.0
_CELL = (8, 17)
"""Pixels of a cell in the GIF."""
_FONTS = "/usr/share/fonts/truetype/dejavu/DejaVuSansMono{}.ttf"
_PLAIN = {
    "black": "000000", "red": "cd3131", "green": "0dbc79", "brown": "e5e510", "blue": "2472c8",
    "magenta": "bc3fbc", "cyan": "11a8cd", "white": "e5e5e5",
}  # fmt: skip
_FOREGROUND, _BACKGROUND = "e6e6e6", "0b0e14"
_BLOCKS = {"█": (0, 0, 1, 1), "▌": (0, 0, 0.5, 1), "▐": (0.5, 0, 1, 1), "▀": (0, 0, 1, 0.5)} | {
    chr(0x2580 + eighths): (0, 1 - eighths / 8, 1, 1) for eighths in range(1, 8)
}
"""Parts of a cell that a block character fills: left, top, right, bottom."""

Cells = list[list[pyte.screens.Char]]


def main() -> int:
    """Record, and return the command's exit code."""
    target, *command = sys.argv[1:]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    frames = list(_frames(terminal))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _write_cast(Path(f"{target}.cast"), " ".join(command), frames)
    _write_gif(Path(f"{target}.gif"), frames)
    return code


def _frames(terminal: int) -> Iterator[tuple[float, Cells]]:
    """Yield second and cells of each picture, until the command has ended."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.Stream(screen)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    began = time.monotonic()
    due = FRAME_S
    while True:
        at = time.monotonic() - began
        if select.select([terminal], [], [], max(0.0, due - at))[0]:
            try:
                stream.feed(decoder.decode(os.read(terminal, 65536)))
            except OSError:  # the end of a pty
                break
        elif at >= due:
            due += FRAME_S
            yield at, _cells(screen)
    yield time.monotonic() - began, _cells(screen)


def _cells(screen: pyte.Screen) -> Cells:
    return [[screen.buffer[line][column] for column in range(COLUMNS)] for line in range(LINES)]


def _write_cast(path: Path, title: str, frames: list[tuple[float, Cells]]) -> None:
    """Write each picture as what changed since the one before."""
    header = {"version": 2, "width": COLUMNS, "height": LINES, "title": title}
    lines = [json.dumps(header), json.dumps([0.0, "o", "\x1b[?25l\x1b[2J"])]
    before: Cells | None = None
    for at, cells in frames:
        if text := "".join(_changes(before, cells)):
            lines.append(json.dumps([round(at, 1), "o", text], ensure_ascii=False))
        before = cells
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes, {len(frames)} frames")


def _changes(before: Cells | None, cells: Cells) -> Iterator[str]:
    style = None
    for line, row in enumerate(cells):
        follows = False
        for column, cell in enumerate(row):
            if before is not None and before[line][column] == cell:
                follows = False
                continue
            if not follows:
                yield f"\x1b[{line + 1};{column + 1}H"
            if (now := _style(cell)) != style:
                yield now
                style = now
            yield cell.data
            follows = True


def _style(cell: pyte.screens.Char) -> str:
    codes = ["0", *(["1"] * cell.bold), *(["7"] * cell.reverse)]
    for base, colour in ((38, cell.fg), (48, cell.bg)):
        if colour != "default":
            red, green, blue = bytes.fromhex(_hex(colour, ""))
            codes.append(f"{base};2;{red};{green};{blue}")
    return f"\x1b[{';'.join(codes)}m"


def _hex(colour: str, default: str) -> str:
    """Return six hex digits of one of pyte's colours."""
    return default if colour == "default" else _PLAIN.get(colour.removeprefix("bright"), colour)


def _write_gif(path: Path, frames: list[tuple[float, Cells]]) -> None:
    fonts = {bold: ImageFont.truetype(_FONTS.format("-Bold" * bold), 13) for bold in (False, True)}
    images = [_draw(cells, fonts).quantize(48, dither=Image.Dither.NONE) for _, cells in frames]
    ends = [at for at, _ in frames[1:]] + [frames[-1][0] + 5]
    spans = [int((end - at) * 1000) for (at, _), end in zip(frames, ends, strict=True)]
    images[0].save(path, save_all=True, append_images=images[1:], duration=spans, loop=0, optimize=True)
    print(f"{path}: {path.stat().st_size} bytes")


def _draw(cells: Cells, fonts: dict[bool, ImageFont.FreeTypeFont]) -> Image.Image:
    width, height = _CELL
    image = Image.new("RGB", (COLUMNS * width, LINES * height), f"#{_BACKGROUND}")
    draw = ImageDraw.Draw(image)
    for line, row in enumerate(cells):
        for column, cell in enumerate(row):
            ink, paper = _hex(cell.fg, _FOREGROUND), _hex(cell.bg, _BACKGROUND)
            if cell.reverse:
                ink, paper = paper, ink
            left, top = column * width, line * height
            draw.rectangle((left, top, left + width - 1, top + height - 1), fill=f"#{paper}")
            if part := _BLOCKS.get(cell.data):
                corners = (part[0] * width, part[1] * height, part[2] * width - 1, part[3] * height - 1)
                box = (left + corners[0], top + corners[1], left + corners[2], top + corners[3])
                draw.rectangle(box, fill=f"#{ink}")
            elif cell.data.strip():
                draw.text((left, top), cell.data, font=fonts[cell.bold], fill=f"#{ink}")
    return image


if __name__ == "__main__":
    sys.exit(main())
