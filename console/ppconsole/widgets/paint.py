"""From rows of `view` to strips: the palettes, and the one place where outside text becomes terminal cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter
from textual.strip import Strip
from textual.theme import Theme

from ppconsole.model.safe import clean
from ppconsole.view.cells import Row


class Tones(NamedTuple):
    """The colours of one palette. Every other style is made of these."""

    fg: str
    bg: str
    dim: str
    strong: str
    accent: str
    ok: str
    warn: str
    bad: str
    info: str
    swap: str
    head: str
    bar: str
    select: str
    alert: str
    alert_warn: str
    on_chip: str


DARK = Tones(
    fg="#c9d1d9", bg="#0d1117", dim="#6e7a88", strong="#f0f4f8", accent="#58b6d8", ok="#7fbf6e", warn="#dfb05a",
    bad="#f2686b", info="#6ba6e8", swap="#b394e0", head="#1b2530", bar="#16202b", select="#23405a", alert="#7d1f27",
    alert_warn="#4d3b12", on_chip="#0d1117",
)  # fmt: skip
LIGHT = Tones(
    fg="#24292f", bg="#fbfbf9", dim="#75808b", strong="#000000", accent="#0b6e99", ok="#2b7a2b", warn="#8f5f00",
    bad="#c0202a", info="#1c5fb8", swap="#6f42b5", head="#e4e9ee", bar="#eceff2", select="#cbe3f5", alert="#f7c9cc",
    alert_warn="#f6e3b4", on_chip="#fbfbf9",
)  # fmt: skip


def _colours(tone: Tones) -> dict[str, Style]:
    """Return the styles of a palette with its own background."""
    styles = {
        name: Style(color=getattr(tone, name))
        for name in ("dim", "strong", "accent", "ok", "warn", "bad", "info", "swap")
    }
    bold = Style(bold=True)
    chip = {"ok": tone.ok, "warn": tone.warn, "bad": tone.bad, "info": tone.info, "name": tone.accent}
    styles |= {f"chip.{name}": Style(color=tone.on_chip, bgcolor=colour, bold=True) for name, colour in chip.items()}
    work = (tone.ok, tone.info, tone.warn, tone.swap)
    styles |= {f"gantt.{index}": Style(color=tone.on_chip, bgcolor=colour) for index, colour in enumerate(work)}
    styles |= {
        "": Style(color=tone.fg, bgcolor=tone.bg),
        "strong": styles["strong"],
        "bad": styles["bad"] + bold,
        "chip.quiet": Style(color=tone.dim, bgcolor=tone.head),
        "bar": Style(bgcolor=tone.bar),
        "head": Style(color=tone.dim, bgcolor=tone.head, bold=True),
        "head.on": Style(color=tone.accent, bold=True),
        "head.word": Style(color=tone.accent, bold=True),
        "select": Style(bgcolor=tone.select),
        "foot": Style(bgcolor=tone.bar),
        "key": Style(color=tone.accent, bold=True),
        "key.text": Style(color=tone.fg),
        "key.off": Style(color=tone.dim, dim=True),
        "alert": Style(color=tone.strong, bgcolor=tone.alert, bold=True),
        "alert.warn": Style(color=tone.strong, bgcolor=tone.alert_warn),
        "out": Style(color=tone.strong),
        "stale": Style(color=tone.dim),
        "spark": Style(color=tone.accent),
        "bar.used": Style(color=tone.ok),
        "bar.free": Style(color=tone.info),
        "bar.room": Style(color=tone.dim, dim=True),
        "bar.limit": Style(color=tone.strong, bold=True),
        "bar.over": Style(color=tone.bad, bold=True),
        "gantt.idle": Style(color=tone.dim, dim=True),
        "gantt.work": Style(color=tone.on_chip, bgcolor=tone.ok),
        "gantt.wait": Style(color=tone.dim),
        "gantt.send": Style(color=tone.accent),
        "gantt.swap": Style(color=tone.swap),
        "kv.free": Style(color=tone.dim, dim=True),
        "kv.cached": Style(color=tone.dim),
        "kv.used": Style(color=tone.ok),
        "kv.shared": Style(color=tone.info),
        "kv.mine": Style(color=tone.warn, bold=True),
    }
    return styles


def _ansi() -> dict[str, Style]:
    """Return styles of the terminal's own 16 colours on its own background; they fit dark and light terminals."""
    parse = Style.parse
    chip = {"ok": "green", "warn": "yellow", "bad": "red", "info": "blue", "name": "cyan"}
    styles = {f"chip.{name}": parse(f"reverse {colour}") for name, colour in chip.items()}
    words = {
        "dim": "dim",
        "strong": "bold",
        "accent": "cyan",
        "ok": "green",
        "warn": "yellow",
        "bad": "bold red",
        "info": "blue",
        "swap": "magenta",
        "bar": "",
        "head": "reverse dim",
        "head.on": "bold",
        "head.word": "bold cyan",
        "select": "reverse",
        "foot": "",
        "key": "bold cyan",
        "key.text": "",
        "key.off": "dim",
        "alert": "bold reverse red",
        "alert.warn": "reverse yellow",
        "out": "",
        "stale": "dim",
        "spark": "cyan",
        "bar.used": "green",
        "bar.free": "blue",
        "bar.room": "dim",
        "bar.limit": "bold",
        "bar.over": "bold red",
        "gantt.idle": "dim",
        "gantt.work": "reverse green",
        "gantt.wait": "dim",
        "gantt.send": "cyan",
        "gantt.swap": "magenta",
        "gantt.0": "reverse green",
        "gantt.1": "reverse blue",
        "gantt.2": "reverse yellow",
        "gantt.3": "reverse magenta",
        "kv.free": "dim",
        "kv.cached": "dim",
        "kv.used": "green",
        "kv.shared": "blue",
        "kv.mine": "bold yellow",
        "chip.quiet": "dim",
    }
    return {"": Style()} | styles | {name: parse(text) if text else Style() for name, text in words.items()}


def _mono() -> dict[str, Style]:
    """Return styles without any colour: bold, dim and reverse alone. Letters and words carry the meaning."""
    plain = {}
    for name, style in _ansi().items():
        keep_dim = style.dim and not style.reverse
        plain[name] = Style(bold=style.bold, dim=keep_dim, reverse=style.reverse, underline=name == "head.on")
    return plain


class Palette:
    """Styles by name."""

    def __init__(self, styles: Mapping[str, Style]) -> None:
        self._styles = styles
        self.base = styles[""]

    def style(self, name: str) -> Style:
        """Return the style called `name`; an unknown name is plain."""
        return self._styles.get(name, Style.null()) if name else Style.null()


class Ink(NamedTuple):
    """A style as it comes on a row, and whether a gap of plain cells looks the same in it."""

    style: Style
    plain_gap: bool


class Brush:
    """How rows become strips. Styles are added up and filtered once for each name and fill: that costs most of a row.

    `filters` are those of the app, for `background`. `faded`: what is shown is stale, so all of it steps back.
    """

    def __init__(self, palette: Palette, filters: Sequence[LineFilter], background: Color, faded: bool) -> None:
        self._palette, self._filters, self._background, self._faded = palette, filters, background, faded
        self._inks: dict[str, dict[str, Ink]] = {}
        """By the fill of a row, then by name."""

    def strip(self, line: Row, width: int) -> Strip:
        """Return `line` in exactly `width` cells."""
        inks = self._inks.setdefault(line.fill, {})
        segments: list[Segment] = []
        base = inks.get("") or self._mix(line.fill, "")
        pending, ink = "", base
        for text, name in line.segs:
            wanted = inks.get(name) or self._mix(line.fill, name)
            # A plain gap looks the same in its neighbour's colour: one style switch less to write over SSH.
            if wanted.style is ink.style or (not name and ink.plain_gap and text.isspace()):
                pending += text
                continue
            if pending:
                segments.append(Segment(clean(pending), ink.style))
            pending, ink = text, wanted
        if pending:
            segments.append(Segment(clean(pending), ink.style))
        # One cell a character, nearly always: then there is nothing to look up.
        used = sum(len(text) if text.isascii() else cell_len(text) for text, _, _ in segments)
        if used < width:
            segments.append(Segment(" " * (width - used), base.style))
        strip = Strip(segments, max(used, width))
        return strip if used <= width else strip.crop(0, width)

    def _mix(self, fill: str, name: str) -> Ink:
        """Note and return the style called `name` on a row filled with `fill`; equal ones are one object."""
        palette = self._palette
        base = palette.base + palette.style(fill)
        style = palette.style(name)
        if base.reverse:  # only its weight, as its colours would make patches
            style = Style(bold=style.bold)
        wanted = base + style if name else base
        if self._faded:
            wanted = wanted + palette.style("stale")
        plain_gap = wanted.bgcolor == base.bgcolor and not wanted.reverse and not wanted.underline
        for each in self._filters:
            wanted = each.apply([Segment("x", wanted)], self._background)[0].style or wanted
        inks = self._inks[fill]
        same = next((ink for ink in inks.values() if ink.style == wanted), None)
        inks[name] = same or Ink(wanted, plain_gap)
        return inks[name]


PALETTES = {
    "pp-dark": Palette(_colours(DARK)),
    "pp-light": Palette(_colours(LIGHT)),
    "ansi-dark": Palette(_ansi()),
    "ansi-light": Palette(_ansi()),
    "mono": Palette(_mono()),
}


def themes() -> list[Theme]:
    """Return the Textual themes that go with the palettes, for input fields, dialogs and toasts."""
    found = []
    for name, tone, dark in (("pp-dark", DARK, True), ("pp-light", LIGHT, False)):
        found.append(
            Theme(
                name=name, primary=tone.accent, secondary=tone.info, warning=tone.warn, error=tone.bad, success=tone.ok,
                accent=tone.accent, foreground=tone.fg, background=tone.bg, surface=tone.bg, panel=tone.head, dark=dark,
            )
        )  # fmt: skip
    return found


def choose_theme(environ: Mapping[str, str]) -> str:
    """Return the theme for a terminal: `PPCONSOLE_THEME`, else by what TERM, COLORTERM and COLORFGBG say."""
    names = {"dark": "pp-dark", "light": "pp-light", "terminal": "ansi-dark"}
    asked = environ.get("PPCONSOLE_THEME", "")
    if asked in names:
        return names[asked]
    background = environ.get("COLORFGBG", "").rpartition(";")[2]
    light = background in ("7", "15")
    many = "256" in environ.get("TERM", "") or environ.get("COLORTERM", "") in ("truecolor", "24bit")
    if "NO_COLOR" in environ or not many:
        return "ansi-light" if light else "ansi-dark"
    return "pp-light" if light else "pp-dark"
