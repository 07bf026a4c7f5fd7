"""The topology of snapshots: places and neighbours, ways of messages, links of cards; the screen and the command."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import rank_snapshots
import snapshots
from cli_helpers import Cli
from fake_gateway import FakeGateway
from ppconsole.model.topology import PlaceRef, topology_of
from ppconsole.view import topology_page
from ppconsole.view.cells import text_of, width_of
from ppconsole.view.marks import faulty_places
from ppengine.protocol.gpu import GpuPeer
from ppengine.protocol.stage_info import SumRoute, SumsInfo, SumTime


def texts(picture, width=80):
    return [text_of(line).rstrip() for line in topology_page.rows(topology_of(picture), width, faulty_places(picture))]


def ref(stage: int, rank: int) -> PlaceRef:
    return PlaceRef(stage=stage, rank=rank)


def ways(picture) -> set[tuple[str, str]]:
    return {(way.carries, way.way) for way in topology_of(picture).ways}


def test_a_rank_talks_to_its_peers_and_to_the_same_rank_of_the_neighbours() -> None:
    found = topology_of(rank_snapshots.ranks(3, 2))
    places = {(each.stage, each.rank): each for each in found.places}
    first, middle, last = places[0, 1], places[1, 1], places[2, 1]
    assert first.tensor_peers == [ref(0, 0)] and first.previous is None and first.next == ref(1, 1)
    assert first.token_source == ref(2, 1) and middle.token_source is None
    assert (middle.previous, middle.next) == (ref(0, 1), ref(2, 1)) and last.next is None
    assert len(found.ways) == 3 + 4 + 2 and len(places) == 6


def test_one_stage_sends_nothing_to_itself() -> None:
    found = topology_of(rank_snapshots.ranks(1, 4))
    assert {way.carries for way in found.ways} == {"all-reduce"} and len(found.ways) == 6
    assert topology_of(snapshots.snapshot(1, 0)).ways == []
    assert "  one place: nothing is sent" in texts(snapshots.snapshot(1, 0))


def test_a_place_that_no_snapshot_has_is_listed_as_unknown() -> None:
    picture = rank_snapshots.ranks()
    picture.stages = [each for each in picture.stages if each.tensor_rank == 0]
    found = topology_of(picture)
    assert [each.pid for each in found.places] == [41200, None, 41202, None] and ("all-reduce", "?") in ways(picture)
    assert texts(picture)[3].split()[:2] == ["0.1", "?"]


def test_ways_are_those_that_the_snapshot_shows() -> None:
    on_cpus, on_cards = rank_snapshots.ranks(), rank_snapshots.on_cards()
    assert ways(on_cpus) == {("all-reduce", "shared memory"), ("hidden states", "TCP"), ("tokens", "TCP")}
    assert {way for _, way in ways(on_cards)} == {"device memory"}
    for each in on_cards.stages:
        each.host = f"n{each.index}"
    assert ways(on_cards) >= {("hidden states", "TCP"), ("tokens", "TCP")}
    far = rank_snapshots.on_cards(2, 1)
    for each in far.stages:
        assert each.gpu is not None and each.gpu.peers
        each.gpu = msgspec.structs.replace(each.gpu, peers=[GpuPeer(uuid=each.gpu.peers[0].uuid, reaches=False)])
    assert ways(far) == {("hidden states", "TCP"), ("tokens", "TCP")}
    far.stages[1].carrier = "RDMA"
    assert ways(far) == {("hidden states", "RDMA"), ("tokens", "TCP")}
    for each in far.stages:
        each.gpu = None
    assert ways(far) == {("hidden states", "?"), ("tokens", "?")}


def test_the_page_at_80_columns() -> None:
    assert texts(rank_snapshots.dead()) == [
        " PLACES  pp2 tp2: 4 processes on 1 node",
        "  PLACE STATE     NODE     PID DEVICE LAYERS  PEERS FROM  TO    TOKENS",
        "    0.0 blocked   n0     41200 cpu    0-11    0.1   -     1.0   1.0",
        "    0.1 blocked   n0     41201 cpu    0-11    0.0   -     1.1   1.1",
        "    1.0 starved   n0     41202 cpu    12-23   1.1   0.0   -     -",
        "!   1.1 dead      n0     41203 cpu    12-23   1.0   0.1   -     -",
        "",
        " MESSAGES",
        "  CARRIES       WAY            BETWEEN",
        "  all-reduce    shared memory  0.0=0.1  1.0=1.1",
        "  hidden states TCP            0.0>1.0  0.1>1.1",
        "  tokens        TCP            1.0>0.0  1.1>0.1",
        "",
        " SUMS OF RANKS",
        "  UP-TO   WAY",
        "  1.0M    shared memory, one round",
        "  more    shared memory, rounds of 1.0 MiB",
        "  PART         TAKES   GB/S  WAY",
        "  8.0K         83 us  0.099  shared memory",
        "  1.0M      1,000 us    1.0  shared memory",
    ]


def sums(picture, width=80) -> list[str]:
    rows = texts(picture, width)
    at = rows.index(" SUMS OF RANKS")
    return rows[at + 1 : rows.index("", at)]


@pytest.mark.parametrize("width", [80, 200])
def test_sums_on_cards_have_the_way_of_each_size(width: int) -> None:
    """And the time of the slowest place."""
    assert sums(rank_snapshots.on_cards(), width) == [
        "  UP-TO   WAY",
        "  512K    one shot, data is its own flag; float32 has flags",
        "  16.0M   one shot, flags",
        "  more    copies beside products, above 4,096 tokens, from 16.0 MiB on",
        "  more    two shots, flags",
        "  PART         TAKES   GB/S  WAY",
        "  8.0K        6.2 us    1.3  one shot",
        "  4.0M         41 us    102  one shot",
        "  16.0M        70 us    240  copies",
    ]


def test_sums_that_no_place_has_measured_are_not_known() -> None:
    picture, routes = rank_snapshots.on_cards(), [SumRoute(most_bytes=None, way="two shots, flags")]
    for each in picture.stages:
        each.sums = SumsInfo(routes=routes)
    assert sums(picture)[-2:] == ["  PART         TAKES   GB/S  WAY", "  ?                ?      ?  ?"]
    picture.stages[0].sums = SumsInfo(routes=routes, times=[SumTime(bytes=2**13, us=9.0)])
    assert sums(picture)[-1] == "  8.0K        9.0 us   0.91  ?", "of an engine that reports no way"
    assert " SUMS OF RANKS" not in texts(rank_snapshots.ranks(2, 1))


def test_a_size_that_goes_two_ways_has_a_time_for_each() -> None:
    """As in an engine with stages on CPUs and on cards."""
    picture = rank_snapshots.ranks()
    picture.stages[3].sums = SumsInfo(times=[SumTime(bytes=2**13, us=6.0, way="one shot")])
    found = [(each.bytes, each.way, each.us) for each in topology_of(picture).sum_times]
    assert found == [(2**13, "one shot", 6.0), (2**13, "shared memory", 82.0), (2**20, "shared memory", 1000.0)]


def test_the_root_of_a_fault_has_its_mark_and_state() -> None:
    picture = rank_snapshots.dead()
    rank_snapshots.of(picture, 1, 1).state = "computing"
    marked = topology_page.rows(topology_of(picture), 80, faulty_places(picture))
    assert [text_of(line).split()[:3] for line in marked[4:6]] == [["1.0", "starved", "n0"], ["!", "1.1", "faulty"]]
    assert [style for text, style in marked[5].segs if text.strip() in ("!", "1.1", "faulty")] == ["bad"] * 3
    assert texts(snapshots.stuck())[4].split()[:3] == ["!", "2", "faulty"]
    rank_snapshots.of(picture, 1, 1).state = "dreaming"
    picture.verdicts = []
    assert texts(picture)[5].split()[:2] == ["1.1", "dreaming"], "a state of a newer engine"


def test_stages_of_one_rank_have_no_peers() -> None:
    rows = texts(snapshots.snapshot(2, 0))
    assert "PEERS" not in rows[1] and rows[2].split()[0] == "0" and "0>1" in "\n".join(rows)


def test_cards_show_their_links_and_a_lowered_or_missing_one() -> None:
    picture = rank_snapshots.on_cards(1, 4)
    rows = "\n".join(texts(picture))
    assert (
        rows.count("all: NV18") == 4 and rows.count("gen 5 x16") == 4 and "all-reduce    device memory  0.0-3" in rows
    )
    first = picture.stages[0]
    assert first.gpu is not None and first.gpu.peers
    peers = [msgspec.structs.replace(first.gpu.peers[0], nvlink=False), *first.gpu.peers[1:]]
    first.gpu = msgspec.structs.replace(first.gpu, nvlinks_active=17, pcie_generation=1, peers=peers)
    rows = "\n".join(texts(picture))
    assert "gen 1 x16 of 5 x16" in rows and "17/18" in rows and "0.1: SYS  0.2: NV17  0.3: NV17" in rows
    first.gpu = None
    assert "?" in texts(picture)[-4] and "CARDS" not in "\n".join(texts(rank_snapshots.ranks()))


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_row_is_wider_than_the_terminal(width: int) -> None:
    for picture in (
        rank_snapshots.on_cards(1, 8),
        rank_snapshots.dead(12, 8),
        snapshots.hostile(),
        snapshots.unknown(),
    ):
        assert max(width_of(text) for text in texts(picture, width)) <= width


def test_the_command_prints_the_page_and_its_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    cli = Cli(capsys, tmp_path)
    with FakeGateway(snapshot=rank_snapshots.ranks()):
        done = cli("topology")
        assert done.code == 0 and "    0.1 computing" in done.out and "0.0=0.1" in done.out
    with FakeGateway(snapshot=rank_snapshots.dead()):
        assert "\n!   1.1 dead" in cli("topology").out
    with FakeGateway(snapshot=rank_snapshots.ranks()):
        found = json.loads(cli("topology", "--json").out)
    assert found["tensor_parallel_size"] == 2 and len(found["places"]) == 4
    assert found["places"][3]["previous"] == {"stage": 0, "rank": 1}
    assert found["sum_times"][0] == {
        "bytes": 8192,
        "way": "shared memory",
        "us": 83.0,
        "gb_s": pytest.approx(8192 / 83e3),
    }
    assert found["ways"][0]["way"] == "shared memory" and found["cards"] == []
