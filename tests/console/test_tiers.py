"""KV tiers: the page's rows, the screens, the command, and the states of requests that wait for backends."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import msgspec
import pytest
import snapshots
from cli_helpers import Cli
from fake_gateway import FakeGateway
from ppconsole.cli.render import detail_lines
from ppconsole.model.request_fields import request_filter
from ppconsole.model.tier_rates import HostMeter, HostRates
from ppconsole.screens.confirm import Confirm
from ppconsole.screens.tiers_screen import BackendScreen, TiersScreen
from ppconsole.view import backend_detail, drilldown, help_page, kvmap, request_table, tier_bars, tiers_page
from ppconsole.view.cells import text_of, width_of
from ppconsole.view.marks import request_mark
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Event, Snapshot
from ppengine.protocol.tiers import BackendInfo, PromptSources, StoreInfo, TiersInfo
from test_tui_console import console

GIB = 2**30
SIZES = [(80, 24), (120, 36), (200, 50)]


def tiers() -> TiersInfo:
    """One backend at work and one that is broken; the last store is late, and the slots add up."""
    stores = [StoreInfo(stage=at, rank=0, pid=4300 + at, age_ms=310.0, jobs=3, lag_ms=12.0) for at in range(4)]
    stores[3].lag_ms, stores[3].age_ms = 2400.0, 1900.0
    return TiersInfo(
        slots=1024, slots_swapped=40, slots_cached=812, slots_moving=24, slots_quarantined=8, slot_bytes=8 * 2**20,
        prompt_tokens_total=4_812_000, device_hit_tokens_total=1_310_000, host_hit_tokens_total=920_000,
        computed_tokens_total=1_720_000, out_bytes_total=220 * GIB, in_bytes_total=118 * GIB, evicted_total=1834,
        dropped_total=12, finding=2, fetching=3, failed_fetches_total=4, ready=True, stores=stores,
        backends=[
            BackendInfo(
                name="nvme0", kind="files", url="/data/kv", write="reused", state="open", quota_bytes=100 * GIB,
                used_bytes=62 * GIB, hit_tokens_total=862_000, read_bytes_total=412 * GIB,
                written_bytes_total=530 * GIB, read_bytes_s=1.9 * GIB, write_bytes_s=0.3 * GIB,
                read_ms=Quantiles(p50=3.1, p90=7.0, p99=18.4, count=900), queue=4, declined_total=117,
                write_ms=Quantiles(p50=22.0, p90=31.0, p99=87.0, count=300), evicted_total=5120,
            ),
            BackendInfo(
                name="cache0", kind="valkey", url="redis://10.0.0.7:6379/0", write="always", state="broken",
                breaker="open", write_breaker="half-open", quota_bytes=16 * GIB,
                error="connection refused by 10.0.0.7:6379", errors_total=41, corrupt_total=1,
            ),
        ],
    )  # fmt: skip


def picture(found: TiersInfo | None = None) -> Snapshot:
    return snapshots.snapshot(4, 8, tiers=found or tiers())


def texts(snapshot: Snapshot, width: int = 80, selected: str | None = None) -> list[str]:
    return [text_of(line).rstrip() for line in tiers_page.rows(snapshot, width, selected)]


def styled(snapshot: Snapshot, style: str) -> list[str]:
    return [text.strip() for line in tiers_page.rows(snapshot, 120) for text, each in line.segs if each == style]


def test_the_page_at_80_columns() -> None:
    assert texts(picture(), selected="nvme0") == [
        " slots 1024 swapped 40 cached 812 moving 24 free 148 quarantined 8",
        " finding 2 fetching 3 short fetches 4 evicted 1834 dropped 12",
        "",
        " TIER     STATE    USE                        USED  SIZE  HIT TOKENS  IN/S OUT/S",
        " device            ████████████████████░░···   812  1024  27%   1.3M",
        " host              ▓░░░░░░░░░░░░░░░░░░░░▒···  6.8G  8.0G  19%   920k     ?     ?",
        ">nvme0    open     ████████████████········· 62.0G  100G  18%   862k  1.9G  307M",
        " cache0   broken   ?                             ? 16.0G   0%      0     ?     ?",
        " computed                                                 36%   1.7M",
        "",
        " BACKEND R-BREAKER W-BREAKER   R50   R99   W50   W99 QUEUE  ERR  BAD DECL",
        ">nvme0   closed    closed    3.1ms  18ms  22ms  87ms     4    0    0  117",
        " cache0  open      half-open     -     -     -     -     0   41    1    0",
        "   connection refused by 10.0.0.7:6379",
        "",
        " STORE   AGE JOBS   LAG    STORE   AGE JOBS   LAG    STORE   AGE JOBS   LAG",
        " 0.0    0.3s    3  12ms    1.0    0.3s    3  12ms    2.0    0.3s    3  12ms",
        " 3.0    1.9s    3  2.4s",
    ]


def test_the_shares_add_up_without_a_backend_that_was_removed() -> None:
    found = tiers()
    assert not any(line.startswith(" removed") for line in texts(picture(found)))
    del found.backends[0]
    (line,) = (line for line in texts(picture(found)) if line.startswith(" removed"))
    assert line.split() == ["removed", "18%", "862k"]


def test_a_wide_page_has_totals_kinds_and_places() -> None:
    shown = texts(picture(), 120)
    assert shown[3].split()[-2:] == ["IN", "OUT"] and shown[6].split()[-2:] == ["412G", "530G"]
    assert shown[10].split()[-4:] == ["EVICT", "WRITE", "KIND", "URL"]
    assert shown[11].split()[-4:] == ["5120", "reused", "files", "/data/kv"]


def test_trouble_is_coloured_and_the_unknown_is_no_zero() -> None:
    assert styled(picture(), "bad") == ["broken", "open", "1", "connection refused by 10.0.0.7:6379", "1.9s"]
    assert "2.4s" in styled(picture(), "warn") and "41" in styled(picture(), "warn")
    nothing = TiersInfo(
        slots=8, stores=[StoreInfo(stage=0, rank=0)], why_not_ready="the weights are being hashed",
        backends=[BackendInfo(name="a", kind="files", url="", write="reused", quota_bytes=GIB)],
    )  # fmt: skip
    shown = texts(picture(nothing))
    assert " backends are not used: the weights are being hashed" in shown
    (backend,) = (line for line in shown if line.startswith(" a ") and "unknown" in line)
    assert backend.split() == ["a", "unknown", "?", "?", "1.0G", "-", "0", "?", "?"]
    (store,) = (line for line in shown if line.startswith(" 0.0"))
    assert store.split() == ["0.0", "none", "0", "-"]


def test_an_engine_without_tiers_says_how_to_get_some() -> None:
    found = snapshots.snapshot(2, 3)
    assert texts(found) == [f"  {tiers_page.NO_TIERS}"]
    found.engine.state = "loading"
    assert texts(found) == ["  the engine is loading: its KV tiers are not known yet"]
    older = msgspec.to_builtins(found)
    del older["tiers"]
    assert msgspec.convert(older, Snapshot).tiers is None


def test_a_page_without_backends_says_how_to_get_one() -> None:
    found = tiers()
    found.backends.clear()
    found.stores.clear()
    assert texts(picture(found))[-1] == "  no backends: store add, or tiers.backends of the profile, names one"


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_names_from_outside_break_no_column(width: int) -> None:
    found = tiers()
    found.backends[0].name, found.backends[0].url = "n" * 200, "\x1b[2J" + "u" * 300
    found.backends[1].name, found.backends[1].error = "界" * 30, "\n\x07" + "e" * 300
    found.backends[1].errors_total = found.backends[1].corrupt_total = 10**12
    found.stores *= 9
    for line in texts(picture(found), width):
        assert width_of(line) <= width and line.isprintable(), line


@pytest.mark.parametrize("width", [80, 120])
def test_each_title_has_a_legend(width: int) -> None:
    for line in texts(picture(), width):
        if line.startswith((" TIER", " BACKEND", " STORE")):
            for title in line.split():
                assert any("tiers screen" in section.title for section in help_page.find(title)), title


@pytest.mark.parametrize(
    ("parts", "whole", "shown"),
    [
        ([1, 1], 1000, "█░········"), ([500, 500], 1000, "█████░░░░░"), ([0, 0], 1000, "··········"),
        ([1000, 0], 1000, "██████████"), ([2000, 5], 1000, "██████████"), ([334, 333], 1000, "███░░░░···"),
    ],
)  # fmt: skip
def test_a_bar_shows_every_part_and_is_as_wide_as_it_may_be(parts: list[int], whole: int, shown: str) -> None:
    made = tier_bars.bar(list(zip("█░", parts, strict=True)), whole, 10)
    assert "".join(text for text, _ in made) == shown  # type: ignore[misc]


def test_rates_of_the_host_come_from_two_seconds_of_totals() -> None:
    meter, found = HostMeter(), picture()
    assert found.tiers is not None
    rates = []
    for at in range(5):
        found.sampled_at, found.tiers.in_bytes_total = 100.0 + at, at * at * GIB
        rates.append(meter.note(copy.deepcopy(found)))
    assert rates[0] == HostRates() and rates[-1] == HostRates((16 - 4) * GIB / 2.0, 0.0)
    assert meter.note(found) == rates[-1], "the same snapshot again changes nothing"
    found.engine.epoch = "another"
    assert meter.note(found) == HostRates()


def test_waiting_for_backends_is_a_state_with_mark_filter_and_count() -> None:
    found = picture()
    found.requests[0].state, found.requests[1].state = "finding", "fetching"
    found.queues.finding, found.queues.fetching = 1, 1
    assert [request_mark(each.state).text for each in found.requests[:2]] == ["find", "fetch"]
    assert "find 1 fetch 1" in text_of(request_table.pool(found, 120))
    assert "find" not in text_of(request_table.pool(snapshots.snapshot(2, 3), 120))
    wanted = request_filter("state:fetch")
    assert [each.id for each in found.requests if wanted.matches(each)] == [found.requests[1].id]


def test_a_request_names_the_sources_of_its_prompt() -> None:
    sources = PromptSources(device=1024, host=4096, backends={"nvme0": 2048}, computed=1024)
    line = "prompt 8192: device 1024 · host 4096 · nvme0 2048 · computed 1024"
    assert drilldown.sources_text(sources, 8192) == line
    assert drilldown.sources_text(sources, 8000).startswith("start 8192: "), "with known outputs"
    assert drilldown.sources_text(PromptSources(computed=7), 7) == "prompt 7: computed 7"
    detail = RequestDetail(
        id="r", owner="ann", state="running", why="", prompt_tokens=8192, output_tokens=0, computed_tokens=0,
        cached_tokens=0, block_table=[], shared_blocks=[], host_blocks=[], in_flight=[], sampling=SamplingParams(),
        revision=0, age_s=1.0, sources=sources,
    )  # fmt: skip
    shown = [text_of(each).rstrip() for each in drilldown.request_rows(None, detail, "", 120)]
    assert f"  came from     {line}" in shown and f"from      {line}" in detail_lines(detail)


def test_the_kv_map_has_the_slots_of_the_host_below_it() -> None:
    bar, counts = kvmap.host_rows(tiers(), 40)
    assert text_of(bar) == " host ▓▓░░░░░░░░░░░░░░░░░░░░░░░░░▒····" or width_of(text_of(bar)) <= 40
    assert text_of(counts) == " ▓ swapped 40 ░ cached 812 ▒ moving 24"
    assert kvmap.host_rows(None, 40) == [] and kvmap.host_rows(TiersInfo(), 40) == []


def test_a_backend_in_full_has_its_own_events() -> None:
    events = [
        Event(seq=1, wall=1.0, kind="store.broken", text="backend cache0 is broken: connection refused"),
        Event(seq=2, wall=2.0, kind="op.applied", text="store pause nvme0: paused", by="ann"),
        Event(seq=3, wall=3.0, kind="store.broken", text="backend cache0-b is broken"),
        Event(seq=4, wall=4.0, kind="request.finished", text="cache0"),
    ]
    shown = [text_of(line).rstrip() for line in backend_detail.rows(picture(), "cache0", events, 80)]
    assert any("connection refused by 10.0.0.7:6379" in line for line in shown)
    assert [line for line in shown if "#" in line] == [line for line in shown if "#1 " in line] != []
    assert any("used" in line and "?" in line for line in shown)
    assert backend_detail.rows(picture(), "gone", events, 80) == []


def test_percentiles_that_are_not_known_take_no_room_of_those_that_are() -> None:
    found = picture()
    assert found.tiers is not None
    backend = next(each for each in found.tiers.backends if each.name == "nvme0")
    backend.read_ms, backend.write_ms = Quantiles(count=0), Quantiles(p50=22.0, p99=87.0, count=3)
    (line,) = [text_of(line) for line in backend_detail.rows(found, "nvme0", [], 80) if "p50" in text_of(line)]
    assert line.split() == ["read", "-", "write", "p50", "22ms", "p99", "87ms"]


async def test_the_screen_has_its_key_and_verbs_on_the_selected_backend() -> None:
    async with console(picture(), size=SIZES[0]) as rig:
        await rig.pilot.press("V")
        assert isinstance(rig.app.screen, TiersScreen) and ">nvme0    open" in rig.screen()
        assert "p pause" in rig.screen() and "t test" in rig.screen()
        await rig.pilot.press("down", "p")
        await rig.pilot.pause()
        assert isinstance(rig.app.screen, Confirm)
        assert "store pause cache0" in rig.screen() and "backend cache0" in rig.screen()
        await rig.pilot.press("escape", "enter")
        assert isinstance(rig.app.screen, BackendScreen) and "10.0.0.7:6379" in rig.screen()
        newer = copy.deepcopy(rig.source.picture)
        assert newer.tiers is not None
        del newer.tiers.backends[1]
        rig.source.send(newer)
        rig.app.tick()
        assert "backend cache0 is not in the engine any more" in rig.screen()
        await rig.pilot.press("escape", "escape", *":store ls", "enter", "question_mark")
        assert "device, host, a backend" in rig.screen()


def test_the_command_prints_the_page_and_its_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    cli = Cli(capsys, tmp_path)
    with FakeGateway(snapshot=picture()):
        done = cli("store", "ls")
        assert done.code == 0 and "EVICT" in done.out and "redis://10.0.0.7:6379/0" in done.out
        assert json.loads(cli("store", "ls", "--json").out)["backends"][1]["used_bytes"] is None
        assert cli("store", "add", "Bad", "files").code == 2
