"""Keys: the line at the bottom by context, and those of the help screen."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.verb_table import ROWS, Target

from ppconsole.view.cells import EMPTY, Row, Seg, fit, row, width_of
from ppconsole.view.panels import PANELS, RESET_KEY, key_of

Key = tuple[str, str, bool]
"""Key, meaning, and whether it is a verb: verbs are offered only while they are possible."""


def _verbs(*targets: Target) -> tuple[Key, ...]:
    """Return the footer's keys of the verbs on `targets`."""
    rows = (row for row in ROWS.values() if row.target in targets)
    return tuple((row.key.key, row.key.label, True) for row in rows if row.key is not None)


COPY_ANSWER: Key = ("Y", "copy answer", False)
SCALE_KEY: Key = ("z Z", "zoom timeline", False)
REQUEST_KEYS: tuple[Key, ...] = (
    ("i", "prompt", True), ("S", "sort", False), *_verbs("request", "memory"), ("?", "help", False),
    ("⏎", "show", False), ("/", "filter", False), ("spc", "mark", False), *_verbs("engine"), ("s", "stacks", False),
    ("l", "logs", False), ("f", "follow", False), COPY_ANSWER, (":", "command", False), ("⇥", "stages", False),
    ("*", "mark all", False), ("F", "freeze", False), ("1-7", "panels", False), ("q", "quit", False),
)  # fmt: skip
MARKED_KEYS: tuple[Key, ...] = (
    ("esc", "unmark", False), *_verbs("request"), ("?", "help", False), ("spc", "mark", False),
    ("*", "mark all", False), ("/", "filter", False), (":", "command", False), ("⏎", "show", False),
    ("q", "quit", False),
)  # fmt: skip
"""Keys while requests are marked: the verbs act on all of them."""


def stage_keys(stage: int | None) -> tuple[Key, ...]:
    """Return the keys while the stages have the focus; those of verbs name the stage that they act on."""
    return (
        ("⏎", "show", False), ("s", "stacks", False), ("l", "logs", False), ("d", "diagnosis", False),
        *on_stage(stage), *_verbs("memory"), ("⇥", "requests", False), ("?", "help", False), ("v", "streams", False),
        ("e", "events", False), *_verbs("engine"), (":", "command", False), ("F", "freeze", False),
        ("q", "quit", False),
    )  # fmt: skip


def on_stage(stage: int | None) -> tuple[Key, ...]:
    """Return the keys of the verbs on a stage, with its number."""
    return tuple((key, text if stage is None else f"{text} {stage}", verb) for key, text, verb in _verbs("stage"))


def diagnosis_keys(suggested: str, stage: int | None) -> tuple[Key, ...]:
    """Return the keys of a diagnosis: the suggested command, and the verbs on the root stage."""
    first: tuple[Key, ...] = (("⏎", suggested, True),) if suggested else ()
    verbs = on_stage(stage) if stage is not None else ()
    return (
        *first, ("t", "stacks", False), ("⇥", "section", False), ("esc", "back", False), *verbs,
        ("E", "export", False), ("v", "streams", False), ("y", "copy CLI line", False), ("↑↓", "scroll", False),
        ("?", "help", False), ("^s", "picture", False),
    )  # fmt: skip


STREAMS_KEYS: tuple[Key, ...] = (
    ("1", "ledger", True), ("2", "strict", True), ("3", "finite", True), ("4", "shadow", True),
    ("5", "checksum", True), ("⇥", "section", False), ("d", "diagnosis", False), ("↑↓", "scroll", False),
    ("esc", "back", False), ("?", "help", False), ("^s", "picture", False),
)  # fmt: skip
LINE_KEYS: dict[str, tuple[Key, ...]] = {
    "prompt": (("⏎", "send", False), ("↑↓", "history", False), ("esc", "leave", False), (":set", "options", False)),
    "filter": (
        ("⏎", "keep", False), ("esc", "clear", False), ("state:wait", "field", False), ("blk>40", "figure", False),
        ("!word", "must not match", False),
    ),
    "search": (("⏎", "keep", False), ("esc", "clear", False), ("↑↓", "history", False)),
    "command": (("⏎", "run", False), ("⇥", "complete", False), ("↑↓", "history", False), ("esc", "leave", False)),
}  # fmt: skip
"""Keys while the line at the bottom is open, by its mode."""
READER_KEYS: tuple[Key, ...] = (
    ("↑↓", "scroll", False), ("g G", "ends", False), ("esc", "back", False), ("/", "search", False),
    ("n N", "next, previous", False), (":", "command", False), ("y", "copy CLI line", False),
    ("^s", "picture", False), ("?", "help", False),
)  # fmt: skip


def reader_keys(first: Sequence[Key], stage: int | None) -> tuple[Key, ...]:
    """Return the keys of a reader with keys of its own, and with those of the verbs on its stage if it has one."""
    verbs = on_stage(stage) if stage is not None else ()
    return (("esc", "back", False), *first, *verbs, *(key for key in READER_KEYS if key[0] != "esc"),
            *_verbs("memory", "engine"))  # fmt: skip


REQUEST_SCREEN_KEYS: tuple[Key, ...] = (
    ("esc", "back", False), *_verbs("request"), COPY_ANSWER, ("↑↓", "scroll", False), ("/", "search", False),
    *READER_KEYS[5:], *_verbs("memory", "engine"),
)  # fmt: skip

ENDED_REQUEST_KEYS: tuple[Key, ...] = tuple(key for key in REQUEST_SCREEN_KEYS if key not in _verbs("request"))

ENGINES_KEYS: tuple[Key, ...] = (
    ("⏎", "attach", False), ("↑↓", "choose", False), ("a-z", "filter", False), ("esc", "back", False),
)  # fmt: skip
INCIDENT_KEYS: tuple[Key, ...] = (
    ("⏎", "its diagnosis", False), ("h", "replay it", False), ("↑↓", "choose", False), ("esc", "back", False),
    ("y", "copy CLI line", False), ("^s", "picture", False), ("?", "help", False),
)  # fmt: skip
FINISHED_KEYS: tuple[Key, ...] = (
    ("⏎", "show", False), ("/", "filter", False), ("S", "sort", False), ("R", "reverse", False),
    ("↑↓", "choose", False), ("esc", "back", False), (":", "command", False), ("g G", "ends", False),
    ("y", "copy CLI line", False), ("^s", "picture", False), ("?", "help", False), *_verbs("memory", "engine"),
)  # fmt: skip
FINISHED_FILTER_KEYS: tuple[Key, ...] = (
    *LINE_KEYS["filter"][:2], ("ttft>1s", "figure", False), ("reason:abort", "field", False),
    ("!word", "must not match", False),
)  # fmt: skip
PAST_KEYS: tuple[Key, ...] = (
    ("spc", "pause", False), ("←→", "10 s", False), ("[ ]", "1 min", False), ("< >", "speed", False),
    ("M", "mark", False), ("J", "jump to it", False), ("e", "events since it", False), ("esc", "leave", False),
    ("⏎", "show", False), ("⇥", "stages", False), ("d", "diagnosis", False), ("?", "help", False),
    ("q", "quit", False),
)  # fmt: skip
MEMORY_KEYS: tuple[Key, ...] = (
    ("⏎", "confirm", False), ("↑↓", "5 % more, less", False), ("PgUp PgDn", "20 % more, less", False),
    ("esc", "cancel", False),
)  # fmt: skip
CONFIRM_KEYS: tuple[Key, ...] = (
    ("⏎", "press button", False), ("⇥ ← →", "buttons", False), ("y", "copy line", False), ("esc", "cancel", False),
)  # fmt: skip
HELP_KEYS: tuple[Key, ...] = (
    ("↑↓", "scroll", False), ("⇥", "section", False), ("g G", "ends", False), ("/", "search", False),
    ("esc", "back", False), ("y", "copy CLI line", False), ("^s", "picture", False),
)  # fmt: skip


def footer(keys: Sequence[Key], width: int, *, verbs: bool, note: str = "") -> Row:
    """Return the key line, with the keys of verbs or without. `?` is the last to go: it explains the others."""
    segs: list[Seg] = []
    room = width - (width_of(note) + 1 if note else 0)
    kept = next((_size(key) for key in keys if key[0] == "?"), 0)
    for key in keys:
        if key[0] == "?":
            kept = 0
        size = _size(key)
        if (key[2] and not verbs) or size > room - kept:
            continue
        segs += [(key[0], "key"), (f" {key[1]} ", "key.text")]
        room -= size
    if note:
        segs.append((" " * max(0, room) + note, "key.off"))
    return Row(tuple(segs), "foot")


def _size(key: Key) -> int:
    """Return the cells of a key with its label."""
    return width_of(key[0]) + width_of(key[1]) + 2


_HELP: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("MOVE", (
        ("↑ ↓ j k", "choose a row"), ("PgUp PgDn g G", "by page, to the ends"),
        ("Tab", "stages or requests"), ("Enter", "show it in detail"), ("Esc", "back"),
    )),
    ("VERBS  each shows its plan and waits for a confirm", (
        *((row.key.key, row.key.help) for row in ROWS.values() if row.key is not None), (":", "command line"),
        (":abort", "many: --owner, --older"),
    )),
    ("PANELS  show or hide", (
        *((key_of(panel), panel) for panel in PANELS), (RESET_KEY, "all by need"),
    )),
    ("LOOK", (
        ("i", "write a prompt"), ("f", "follow its output"), ("s", "stacks"), ("l", "logs"),
        ("e", "events"), ("d", "diagnosis"), ("v", "streams and checks"), ("w", "engines"),
        ("I", "incidents"), ("h", "the last hour"), ("H", "requests that have ended"),
        ("T", "trends"), ("t", "time span of the trends"),
        ("/", "filter; Esc clears it"), ("Space", "mark; verbs act on marks"),
        ("*", "mark all shown, or none"), ("S", "sort: S, then a letter"),
        ("R", "reverse the order"), (":sort", "the same: :sort ttft"),
        ("z Z", "zoom timeline in, out"),
        ("F", "freeze the display"), ("y Y", "copy CLI line, answer"),
        ("Ctrl+S", "save a picture"), ("Ctrl+P", "all commands"), ("q", "quit; the engine stays"),
    )),
    ("IN THE PAST  replay, incident, ended engine, last hour", (
        ("Space", "pause, go on"), ("← →", "10 s back or on"), ("[ ]", "a minute back or on"),
        ("< >", "slower, faster"), ("M", "mark this moment"), ("J", "to the mark and back"),
        ("e", "events since the mark"),
        ("Esc", "back to the present"),
    )),
)  # fmt: skip


_TWO_COLUMNS, _KEY_CELL = 78, 14


def help_rows(width: int) -> list[Row]:
    """Return the keys of the main screen, in as many columns as fit."""
    across = 2 if width >= _TWO_COLUMNS else 1
    cell = width // across
    rows: list[Row] = []
    for title, keys in _HELP:
        rows.append(row((fit(f" {title}", width), ""), fill="head"))
        half = -(-len(keys) // across)
        for index in range(half):
            segs: list[Seg] = []
            for key, text in keys[index::half]:
                segs += [(f"  {fit(key, _KEY_CELL)}", "key"), (fit(text, cell - _KEY_CELL - 2), "")]
            rows.append(Row(tuple(segs)))
    return rows


def too_small(width: int, height: int, need_width: int, need_height: int) -> list[Row]:
    """Return the card for a terminal that is too small."""
    text = (f"needs {need_width}x{need_height}", f"this is {width}x{height}")
    top = max(0, (height - len(text)) // 2)
    return [EMPTY] * top + [row((each.center(width)[:width], "warn")) for each in text]
