"""Keys: the line at the bottom by context, and those of the help screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppengine.protocol.verb_table import ROWS, Role, Target, covers

from ppconsole.view.cells import EMPTY, Row, Seg, fit, row, width_of
from ppconsole.view.panels import PANELS, RESET_KEY, key_of

Key = tuple[str, str, Role | None]
"""Key, meaning, and the least role of a verb, None if it is none: verbs are offered only while they are possible."""
_OPERATOR: Role = "operator"


def _verbs(*targets: Target) -> tuple[Key, ...]:
    """Return the footer's keys of the verbs on `targets`."""
    rows = (row for row in ROWS.values() if row.target in targets)
    return tuple((row.key.key, row.key.label, row.role) for row in rows if row.key is not None)


COPY_ANSWER: Key = ("Y", "copy answer", None)
LEVEL_KEY: Key = ("W", "warnings", None)
SCALE_KEY: Key = ("z Z", "zoom timeline", None)
RANKS_KEY: Key = ("u", "ranks", None)
REQUEST_KEYS: tuple[Key, ...] = (
    ("i", "prompt", _OPERATOR), ("S", "sort", None), *_verbs("request", "memory"), ("?", "help", None),
    ("⏎", "show", None), ("/", "filter", None), ("spc", "mark", None), *_verbs("engine"), ("s", "stacks", None),
    ("l", "logs", None), LEVEL_KEY, ("f", "follow", None), COPY_ANSWER, (":", "command", None), ("⇥", "stages", None),
    ("*", "mark all", None), ("F", "freeze", None), ("1-7", "panels", None), ("q", "quit", None),
)  # fmt: skip
MARKED_KEYS: tuple[Key, ...] = (
    ("esc", "unmark", None), *_verbs("request"), ("?", "help", None), ("spc", "mark", None),
    ("*", "mark all", None), ("/", "filter", None), (":", "command", None), ("⏎", "show", None),
    ("q", "quit", None),
)  # fmt: skip
"""Keys while requests are marked: the verbs act on all of them."""


def stage_keys(stage: int | None, *, ranked: bool = False) -> tuple[Key, ...]:
    """Return the keys while the stages have the focus; those of verbs name the stage that they act on.

    `ranked`: stages have ranks, which a key shows.
    """
    return (
        ("⏎", "show", None), *((RANKS_KEY,) if ranked else ()), ("s", "stacks", None), ("l", "logs", None),
        ("d", "diagnosis", None), *on_stage(stage), *_verbs("memory"), ("⇥", "requests", None), ("?", "help", None),
        ("v", "streams", None), ("e", "events", None), LEVEL_KEY, ("L", "topology", None), ("K", "clients", None),
        ("V", "tiers", None),
        *_verbs("engine"), (":", "command", None), ("F", "freeze", None), ("q", "quit", None),
    )  # fmt: skip


def on_stage(stage: int | None) -> tuple[Key, ...]:
    """Return the keys of the verbs on a stage, with its number."""
    return tuple((key, text if stage is None else f"{text} {stage}", role) for key, text, role in _verbs("stage"))


def diagnosis_keys(suggested: str, stage: int | None) -> tuple[Key, ...]:
    """Return the keys of a diagnosis: the suggested command, and the verbs on the root stage."""
    row = next((each for each in ROWS.values() if f"{suggested} ".startswith(f"{each.words} ")), None)
    least = _OPERATOR if row is None else row.role
    first: tuple[Key, ...] = (("⏎", suggested, least),) if suggested else ()
    verbs = on_stage(stage) if stage is not None else ()
    return (
        *first, ("t", "stacks", None), ("⇥", "section", None), ("esc", "back", None), *verbs,
        ("E", "export", None), ("v", "streams", None), ("y", "copy CLI line", None), ("↑↓", "scroll", None),
        ("?", "help", None), ("^s", "picture", None),
    )  # fmt: skip


SCREENS_KEY: Key = ("d v e K", "other screens", None)
STREAMS_KEYS: tuple[Key, ...] = (
    ("1", "ledger", _OPERATOR), ("2", "strict", _OPERATOR), ("3", "finite", _OPERATOR), ("4", "shadow", _OPERATOR),
    ("5", "checksum", _OPERATOR), ("⇥", "section", None), ("d", "diagnosis", None), ("↑↓", "scroll", None),
    ("esc", "back", None), ("?", "help", None), ("^s", "picture", None),
)  # fmt: skip
LINE_KEYS: dict[str, tuple[Key, ...]] = {
    "prompt": (("⏎", "send", None), ("↑↓", "history", None), ("esc", "leave", None), (":set", "options", None)),
    "filter": (
        ("⏎", "keep", None), ("esc", "clear", None), ("state:wait", "field", None), ("blk>40", "figure", None),
        ("!word", "must not match", None),
    ),
    "search": (("⏎", "keep", None), ("esc", "clear", None), ("↑↓", "history", None)),
    "command": (("⏎", "run", None), ("⇥", "complete", None), ("↑↓", "history", None), ("esc", "leave", None)),
}  # fmt: skip
"""Keys while the line at the bottom is open, by its mode."""
READER_KEYS: tuple[Key, ...] = (
    ("↑↓", "scroll", None), ("g G", "ends", None), ("esc", "back", None), ("/", "search", None),
    ("n N", "next, previous", None), (":", "command", None), ("y", "copy CLI line", None),
    ("^s", "picture", None), ("?", "help", None), SCREENS_KEY,
)  # fmt: skip


def reader_keys(first: Sequence[Key], stage: int | None) -> tuple[Key, ...]:
    """Return the keys of a reader with keys of its own, and with those of the verbs on its stage if it has one."""
    verbs = on_stage(stage) if stage is not None else ()
    return (("esc", "back", None), *first, *verbs, *(key for key in READER_KEYS if key[0] != "esc"),
            *_verbs("memory", "engine"))  # fmt: skip


CLIENTS_KEYS: tuple[Key, ...] = tuple(
    key
    for key in reader_keys((("↑↓", "choose", None), ("⏎", "its requests", None), *_verbs("client")), None)
    if key != ("↑↓", "scroll", None)
)
TIERS_KEYS: tuple[Key, ...] = tuple(
    key
    for key in reader_keys((("↑↓", "choose", None), ("⏎", "show", None), *_verbs("backend")), None)
    if key != ("↑↓", "scroll", None)
)
BACKEND_KEYS: tuple[Key, ...] = reader_keys(tuple(key for key in _verbs("backend") if key[0] != "A"), None)
REQUEST_SCREEN_KEYS: tuple[Key, ...] = (
    ("esc", "back", None), *_verbs("request"), COPY_ANSWER, ("↑↓", "scroll", None), ("/", "search", None),
    *READER_KEYS[5:], *_verbs("memory", "engine"),
)  # fmt: skip

ENDED_REQUEST_KEYS: tuple[Key, ...] = tuple(key for key in REQUEST_SCREEN_KEYS if key not in _verbs("request"))

ENGINES_KEYS: tuple[Key, ...] = (
    ("⏎", "attach", None), ("↑↓", "choose", None), ("a-z", "filter", None), ("esc", "back", None),
)  # fmt: skip
INCIDENT_KEYS: tuple[Key, ...] = (
    ("⏎", "its diagnosis", None), ("h", "replay it", None), ("↑↓", "choose", None), ("esc", "back", None),
    ("y", "copy CLI line", None), ("^s", "picture", None), ("?", "help", None),
)  # fmt: skip
FINISHED_KEYS: tuple[Key, ...] = (
    ("⏎", "show", None), ("/", "filter", None), ("S", "sort", None), ("R", "reverse", None),
    ("↑↓", "choose", None), ("esc", "back", None), (":", "command", None), ("g G", "ends", None),
    ("y", "copy CLI line", None), ("^s", "picture", None), ("?", "help", None), *_verbs("memory", "engine"),
)  # fmt: skip
FINISHED_FILTER_KEYS: tuple[Key, ...] = (
    *LINE_KEYS["filter"][:2], ("ttft>1s", "figure", None), ("reason:abort", "field", None),
    ("!word", "must not match", None),
)  # fmt: skip
PAST_KEYS: tuple[Key, ...] = (
    ("esc", "leave", None), ("spc", "pause", None), ("←→", "10 s", None), ("[ ]", "1 min", None),
    ("< >", "speed", None), ("M", "mark", None), ("J", "jump to it", None), ("e", "events since it", None),
    ("⏎", "show", None), ("⇥", "stages", None), ("d", "diagnosis", None), ("?", "help", None),
    ("q", "quit", None),
)  # fmt: skip
MEMORY_KEYS: tuple[Key, ...] = (
    ("⏎", "confirm", None), ("↑↓", "5 % more, less", None), ("PgUp PgDn", "20 % more, less", None),
    ("esc", "cancel", None),
)  # fmt: skip
CONFIRM_KEYS: tuple[Key, ...] = (
    ("⏎", "press button", None), ("⇥ ← →", "buttons", None), ("y", "copy line", None), ("esc", "cancel", None),
)  # fmt: skip
HELP_KEYS: tuple[Key, ...] = (
    ("↑↓", "scroll", None), ("⇥", "section", None), ("g G", "ends", None), ("/", "search", None),
    ("esc", "back", None), ("y", "copy CLI line", None), ("^s", "picture", None),
)  # fmt: skip


def offered(keys: Sequence[Key], role: Role | None) -> list[Key]:
    """Return the keys without those of verbs that `role` does not cover; None: no verb is possible."""
    return [key for key in keys if key[2] is None or (role is not None and covers(role, key[2]))]


def footer(keys: Sequence[Key], width: int, *, role: Role | None, note: str = "") -> Row:
    """Return the key line, with the keys of verbs that `role` covers; None: with none of them.

    `?` is the last to go: it explains the others.
    """
    segs: list[Seg] = []
    room = width - (width_of(note) + 1 if note else 0)
    kept = next((_size(key) for key in keys if key[0] == "?"), 0)
    for key in offered(keys, role):
        if key[0] == "?":
            kept = 0
        size = _size(key)
        if size > room - kept:
            continue
        segs += [(key[0], "key"), (f" {key[1]} ", "key.text")]
        room -= size
    if note:
        segs.append((" " * max(0, room) + note, "key.off"))
    return Row(tuple(segs), "foot")


def _size(key: Key) -> int:
    """Return the cells of a key with its label."""
    return width_of(key[0]) + width_of(key[1]) + 2


_PAGES: tuple[Target, ...] = ("client", "backend")
"""Targets whose keys are on a page of their own."""
_PROMPT_KEY = "i"
_HELP: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("MOVE", (
        ("↑ ↓ j k", "choose a row"), ("PgUp PgDn g G", "by page, to the ends"),
        ("Tab", "stages or requests"), ("u", "open, fold its ranks"),
        ("Enter", "show it in detail"), ("Esc", "back"),
    )),
    ("VERBS  each shows its plan and waits for a confirm", (
        *((row.key.key, row.key.help) for row in ROWS.values() if row.key is not None and row.target not in _PAGES),
        (":", "command line"),
        (":abort", "many: --owner, --older"),
    )),
    ("PANELS  show or hide", (
        *((key_of(panel), panel) for panel in PANELS), (RESET_KEY, "all by need"),
    )),
    ("LOOK", (
        (_PROMPT_KEY, "write a prompt"), ("f", "follow its output"), ("s", "stacks"), ("l", "logs"),
        ("e", "events"), ("W", "warnings; errors; all"),
        ("d", "diagnosis"), ("v", "streams and checks"), ("w", "engines"),
        ("L", "topology"), ("K V", "HTTP clients; tiers"),
        ("I", "incidents"), ("h", "the last hour"), ("H", "requests that have ended"),
        ("T t", "trends, their time span"),
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


_PAST, _VERBS = "IN THE PAST", "VERBS"
_TWO_COLUMNS, _KEY_CELL = 78, 14


def _helped(role: Role, past: bool) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """Yield the sections of the help, without the keys of verbs that `role` does not cover.

    In a past its keys come first, and no verb is possible.
    """
    rows = [row for row in ROWS.values() if row.target not in _PAGES]
    leasts = {row.key.key: row.role for row in rows if row.key is not None}
    refused = {key for key, least in leasts.items() if not covers(role, least)}
    if not covers(role, ROWS["submit"].role):
        refused.add(_PROMPT_KEY)
    first = sorted(_HELP, key=lambda each: not each[0].startswith(_PAST)) if past else _HELP
    for title, keys in first:
        if past and title.startswith(_VERBS):
            continue
        if kept := tuple(each for each in keys if each[0] not in refused):
            yield title, kept


def help_rows(width: int, role: Role = "admin", *, past: bool = False) -> list[Row]:
    """Return the keys of the main screen, in as many columns as fit; those of verbs that `role` covers.

    `past`: the screen shows a past.
    """
    across = 2 if width >= _TWO_COLUMNS else 1
    cell = width // across
    rows: list[Row] = []
    for title, keys in _helped(role, past):
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
