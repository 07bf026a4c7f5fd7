"""Colours: the palettes by style name, the Textual themes beside them, and the choice for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rich.style import Style
from textual.theme import Theme


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
        "chip.dim": Style(color=tone.dim, bgcolor=tone.head),
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
        "chip.dim": "dim",
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


PALETTES = {
    "pp-dark": Palette(_colours(DARK)),
    "pp-light": Palette(_colours(LIGHT)),
    "ansi-dark": Palette(_ansi()),
    "ansi-light": Palette(_ansi()),
    "mono": Palette(_mono()),
}


def themes() -> list[Theme]:
    """Return the Textual themes that go with the palettes, for input fields and dialogs."""
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
