"""The Topology screen as rows: places and neighbours, the ways of messages, and the links of cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import groupby

from ppengine.protocol.gpu import GpuPeer
from ppengine.protocol.place import Place

from ppconsole.model.ranks import short
from ppconsole.model.safe import clean
from ppconsole.model.topology import UNKNOWN, CardInfo, PlaceInfo, PlaceRef, Topology, Way
from ppconsole.model.units import bytes_text
from ppconsole.view.cells import (
    EMPTY,
    FLEX,
    Cell,
    Column,
    Row,
    clip,
    fitted,
    header,
    place,
    row,
    table_row,
    width_of,
    wrap,
)
from ppconsole.view.drilldown import heading, ranges
from ppconsole.view.marks import Mark, state_mark, state_word

_NOTHING = "-"
_INDENT = 2
_PLACES = (
    Column("place", "PLACE", 5, 0, ">"),
    Column("state", "STATE", 9, 1),
    Column("node", "NODE", 6, 3),
    Column("pid", "PID", 7, 5, ">"),
    Column("device", "DEVICE", 6, 4),
    Column("layers", "LAYERS", 7, 6),
    Column("peers", "PEERS", 5, 2),
    Column("previous", "FROM", 5, 2),
    Column("next", "TO", 5, 2),
    Column("tokens", "TOKENS", 6, 2),
    Column("rest", "", 1, 9, grow=FLEX),
)
_MOST = {"node": 20, "device": 16, "peers": 12}
"""Columns as wide as their longest text, and their limits."""
_WIDE_FROM, _WIDE_DEVICE = 100, 26
_CARDS = (
    Column("places", "PLACES", 8, 0),
    Column("name", "CARD", 6, 2),
    Column("bus", "BUS-ID", 12, 4),
    Column("pcie", "PCIE", 9, 1),
    Column("nvlink", "NVLINK", 6, 1),
    Column("links", "LINKS", 14, 3, grow=FLEX),
)
_CARD_MOST = {"places": 14, "name": 24, "pcie": 18}
_PATHS = {
    "one board": "PIX", "one switch": "PIX", "switches": "PXB", "host bridge": "PHB", "NUMA node": "NODE",
    "other NUMA node": "SYS",
}  # fmt: skip
"""Paths on PCIe by the words that `nvidia-smi topo -m` has for them."""


def rows(topology: Topology, width: int, faulty: Set[Place] = frozenset()) -> list[Row]:
    """Return the page: places, messages and, where there are cards, these with their links.

    `faulty`: places that are the root of a fault, to mark.
    """
    ranked = topology.tensor_parallel_size > 1
    count = len(topology.places)
    nodes = len({each.node for each in topology.places if each.node is not None})
    size = f"pp{topology.pipeline_parallel_size} tp{topology.tensor_parallel_size}"
    where = f" on {nodes} node{'' if nodes == 1 else 's'}" if nodes else ""
    found = [heading(f"PLACES  {size}: {count} process{'' if count == 1 else 'es'}{where}", width)]
    found += _places(topology.places, ranked, width, faulty)
    found += [EMPTY, heading("MESSAGES", width), *_messages(topology, ranked, width)]
    if topology.sum_routes:
        found += [EMPTY, heading("SUMS OF RANKS", width), *_sums(topology, width)]
    if topology.cards:
        found += [EMPTY, heading("CARDS", width), *_cards(topology.cards, ranked, width)]
    return found


def _name(ref: PlaceRef | PlaceInfo | None, ranked: bool) -> str:
    return _NOTHING if ref is None else short(Place(ref.stage, ref.rank), ranked)


def _table(
    columns: Sequence[Column], cells: list[dict[str, Cell]], fit: dict[str, int], width: int,
    marked: Set[int] = frozenset(),
) -> list[Row]:  # fmt: skip
    """Return titles and rows; columns in `fit` are as wide as their longest text, up to a limit.

    Rows whose number is in `marked` have the mark of a root in front.
    """
    placed = place(_fitted(columns, cells, fit), width - _INDENT)
    titles = row((" " * _INDENT, ""), *((text, "dim") for text, _ in header(placed).segs))
    return [
        titles,
        *(
            Row((("!" if number in marked else " ", "bad"), (" ", ""), *table_row(placed, each).segs))
            for number, each in enumerate(cells)
        ),
    ]


def _fitted(columns: Sequence[Column], cells: list[dict[str, Cell]], fit: dict[str, int]) -> Sequence[Column]:
    for key, most in fit.items():
        columns = fitted(columns, {key: [str(each[key][0]) for each in cells]}, most)
    return columns


def _places(places: Sequence[PlaceInfo], ranked: bool, width: int, faulty: Set[Place]) -> list[Row]:
    """Return one row a place."""
    columns = _PLACES if ranked else tuple(column for column in _PLACES if column.key != "peers")
    fit = {column.key: _MOST[column.key] for column in columns if column.key in _MOST}
    if width >= _WIDE_FROM:
        fit["device"] = _WIDE_DEVICE
    marked = {number for number, each in enumerate(places) if Place(each.stage, each.rank) in faulty}
    cells = [_place(each, ranked, number in marked) for number, each in enumerate(places)]
    return _table(columns, cells, fit, width, marked)


def _place(info: PlaceInfo, ranked: bool, is_faulty: bool) -> dict[str, Cell]:
    """Return the cells of one place."""
    mark = Mark(UNKNOWN, "dim") if info.state is None else state_mark(info.state, is_faulty)
    peers = sorted(each.rank for each in info.tensor_peers)
    layers = f"{info.layers[0]}-{info.layers[1] - 1}" if len(info.layers) == 2 else UNKNOWN
    device = UNKNOWN if info.device is None else info.device.name or info.device.kind
    return {
        "place": (_name(info, ranked), "bad" if is_faulty or mark.style == "bad" else "strong"),
        "state": (state_word(info.state or UNKNOWN, mark), mark.style),
        "node": (info.node or UNKNOWN, ""),
        "pid": (UNKNOWN if info.pid is None else str(info.pid), "dim"),
        "device": (clean(device), ""),
        "layers": (layers, "dim"),
        "peers": (f"{info.stage}.{ranges(peers).replace(' ', ',')}" if peers else _NOTHING, ""),
        "previous": (_name(info.previous, ranked), ""),
        "next": (_name(info.next, ranked), ""),
        "tokens": (_name(info.token_source, ranked), ""),
        "rest": ("", ""),
    }


def _messages(topology: Topology, ranked: bool, width: int) -> list[Row]:
    """Return a line for each kind of message and way, with the places between which it goes."""
    kinds: dict[tuple[str, str], list[Way]] = {}
    for each in topology.ways:
        kinds.setdefault((each.carries, each.way), []).append(each)
    if not kinds:
        return [row(("  one place: nothing is sent", "dim"))]
    found = [row((f"  {'CARRIES':<14}{'WAY':<15}BETWEEN", "dim"))]
    for (carries, way), ways in kinds.items():
        parts = wrap("  ".join(_between(ways, topology.tensor_parallel_size, ranked)), max(20, width - 34))
        style = "warn" if way == UNKNOWN else "strong"
        found.append(row((f"  {carries:<14}", ""), (f"{way:<15}", style), (parts[0], "")))
        found += [row((" " * 31, ""), (part, "")) for part in parts[1:]]
    return [clip(line, width) for line in found]


def _sums(topology: Topology, width: int) -> list[Row]:
    """Return a line for each way of a sum, by the size of a part, and one for each size that was measured."""
    found = [row((f"  {'UP-TO':<8}WAY", "dim"))]
    for route in topology.sum_routes:
        size = "more" if route.most_bytes is None else bytes_text(route.most_bytes)
        found.append(row((f"  {size:<8}", "strong"), (clean(route.way), "")))
    found.append(row((f"  {'PART':<8}{'TAKES':>10}  {'GB/S':>5}  WAY", "dim")))
    for each in topology.sum_times:
        takes, rate, way = _digits(each.us) + " us", _digits(each.gb_s), clean(each.way or UNKNOWN)
        found.append(row((f"  {bytes_text(each.bytes):<8}", "strong"), (f"{takes:>10}  {rate:>5}  {way}", "")))
    if not topology.sum_times:
        found.append(row((f"  {UNKNOWN:<8}", "strong"), (f"{UNKNOWN:>10}  {UNKNOWN:>5}  {UNKNOWN}", "warn")))
    return [clip(line, width) for line in found]


def _digits(value: float) -> str:
    """Return a figure with two digits or more, `0.099`, `6.3`, `1,014`."""
    return f"{value:,.0f}" if value >= 10 else f"{value:#.2g}"


def _between(ways: list[Way], tensor: int, ranked: bool) -> list[str]:
    """Return the pairs of places: `0.0>1.0`, `0.0=0.1` for both ways, `0.0-7` for all ranks of a stage."""
    found = []
    for stage, group in groupby(ways, lambda each: each.source.stage):
        pairs = list(group)
        if pairs[0].both and tensor > 2 and len(pairs) == tensor * (tensor - 1) // 2:
            found.append(f"{stage}.0-{tensor - 1}")
        else:
            found += [
                f"{_name(each.source, ranked)}{'=' if each.both else '>'}{_name(each.target, ranked)}" for each in pairs
            ]
    return found


def _cards(cards: Sequence[CardInfo], ranked: bool, width: int) -> list[Row]:
    """Return one row a card. Links to the other cards that do not fit are in rows below it."""
    names = {each.uuid: ",".join(_name(one, ranked) for one in each.places) for each in cards}
    texts = [_links(each, names) for each in cards]
    columns = _fitted(_CARDS, _card_cells(cards, names, texts), _CARD_MOST)
    room = next((each.width for each in place(columns, width - _INDENT) if each.column.key == "links"), 0)
    beside = [text if width_of(text) <= room else "" for text in texts]
    titles, *lines = _table(_CARDS, _card_cells(cards, names, beside), _CARD_MOST, width)
    found = [titles]
    for line, text, shown in zip(lines, texts, beside, strict=True):
        found.append(line)
        if text and not shown:
            found += [row(("    ", ""), (part, "dim")) for part in wrap(text, max(20, width - 6))]
    return found


def _card_cells(cards: Sequence[CardInfo], names: Mapping[str, str], links: Sequence[str]) -> list[dict[str, Cell]]:
    """Return the cells of each card. `links`: text of the links to the other cards."""
    return [
        {
            "places": (names[each.uuid], "strong"), "name": (clean(each.name), ""),
            "bus": (each.bus_id or UNKNOWN, "dim"), "pcie": (_pcie(each), "warn" if _lowered(each) else ""),
            "nvlink": (_nvlink(each), "warn" if (each.nvlinks_active or 0) < (each.nvlinks or 0) else ""),
            "links": (text, ""),
        }
        for each, text in zip(cards, links, strict=True)
    ]  # fmt: skip


def _pcie(card: CardInfo) -> str:
    """Return `gen 5 x16`, and what card and slot allow if it is more."""
    if card.pcie_generation is None and card.pcie_width is None:
        return UNKNOWN
    more = f" of {card.pcie_generation_most or UNKNOWN} x{card.pcie_width_most or UNKNOWN}" if _lowered(card) else ""
    return f"gen {card.pcie_generation or UNKNOWN} x{card.pcie_width or UNKNOWN}{more}"


def _lowered(card: CardInfo) -> bool:
    """Return whether the PCIe link is below what card and slot allow."""
    return any(
        now is not None and most is not None and now < most
        for now, most in (
            (card.pcie_generation, card.pcie_generation_most), (card.pcie_width, card.pcie_width_most),
        )
    )  # fmt: skip


def _nvlink(card: CardInfo) -> str:
    """Return how many NVLinks are up, of all that the card has."""
    return _NOTHING if card.nvlinks is None else f"{card.nvlinks_active}/{card.nvlinks}"


def _links(card: CardInfo, names: Mapping[str, str]) -> str:
    """Return the way to each other card, `0.1: NV18  1.0: SYS`; if it is the same for all, once."""
    ways = [(names[peer.uuid], _link(card, peer)) for peer in card.peers]
    if len(ways) > 1 and len(ways) == len(names) - 1 and len({way for _, way in ways}) == 1:
        return f"all: {ways[0][1]}"
    return "  ".join(f"{name}: {way}" for name, way in ways)


def _link(card: CardInfo, peer: GpuPeer) -> str:
    """Return the best way to a card: `NV18`, or the path on PCIe."""
    if peer.nvlink:
        return f"NV{peer.links or card.nvlinks_active or ''}"
    return _PATHS.get(peer.path or "", peer.path or UNKNOWN)
