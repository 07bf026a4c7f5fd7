"""The clients of the HTTP port: the page's rows, the screen and the command."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import msgspec
import pytest
import snapshots
from cli_helpers import Cli
from fake_gateway import FakeGateway
from ppconsole.screens.clients_screen import ClientsScreen
from ppconsole.screens.confirm import Confirm
from ppconsole.view import clients_page, help_page
from ppconsole.view.cells import text_of, width_of
from ppconsole.widgets.prompt import PromptLine
from ppengine.protocol.clients import ClientInfo, KeyLimit
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.snapshot import Latency, SloInfo, Snapshot
from test_tui_console import console

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SIZES = [(80, 24), (120, 36), (200, 50)]


def clients() -> list[ClientInfo]:
    """Two keys and three routes; the last has not answered yet."""
    ttft, itl = Quantiles(p50=184.0, p90=410.0, p99=1840.0), Quantiles(p50=22.0, p90=31.0, p99=87.0)
    return [
        ClientInfo(
            key="alice", route=CHAT, open=31, slow=2, requests_total=18_432, tokens_total=2_480_000, refused_total=17,
            errors_total=3, failed_total=1, left_total=5, requests_s=4.3, tokens_s=1210.0, ttft_ms=ttft, itl_ms=itl,
        ),
        ClientInfo(
            key="batch", route=TEXT, open=6, requests_total=812, tokens_total=96_000, requests_s=0.2, tokens_s=87.0,
            ttft_ms=ttft, itl_ms=itl,
        ),
        ClientInfo(key="batch", route="/v1/embeddings", requests_total=1, errors_total=1),
    ]  # fmt: skip


def picture(*found: ClientInfo) -> Snapshot:
    return snapshots.snapshot(2, 3, clients=list(found))


def texts(found: list[ClientInfo], width: int = 80) -> list[str]:
    return [text_of(line).rstrip() for line in clients_page.rows(found, width)]


def styled(found: list[ClientInfo], style: str) -> list[str]:
    return [text.strip() for line in clients_page.rows(found, 80)[1:] for text, each in line.segs if each == style]


def test_the_page_at_80_columns() -> None:
    assert texts(clients()) == [
        " KEY   ROUTE       OPEN SLOW REQ/S TOK/S  TTFT TTFT99   ITL ITL99 ERR 429 LEFT",
        " all                 37    2   4.5  1297                            5  17    5",
        " alice chat          31    2   4.3  1210 184ms   1.8s  22ms  87ms   4  17    5",
        " batch completions    6    0   0.2    87 184ms   1.8s  22ms  87ms   0   0    0",
        " batch embeddings     0    0     -     -     -      -     -     -   1   0    0",
    ]


def test_wide_pages_have_all_percentiles_and_totals() -> None:
    title, *rest = texts(clients(), 120)
    for column in clients_page.COLUMNS:
        if column.key == "limit":
            continue
        assert column.title in title.split()
    assert rest[0].split()[-2:] == ["19.2k", "2.6M"] and "410ms" in rest[1] and "31ms" in rest[1]
    assert {"TTFT90", "ITL90", "REQS", "TOKENS"}.isdisjoint(texts(clients(), 119)[0].split())


def test_limits_are_a_column_while_a_key_has_one() -> None:
    found = clients()
    found[1].most_open, found[1].per_minute = 8, 60
    found.append(ClientInfo(key="eve", route="", draining=True))
    for width in (80, 120):
        title, *rest = texts(found, width)
        at = title.index("LIMIT")
        assert [line[at:].split("  ")[0].strip() for line in rest] == ["", "", "8 60/min", "", "drain"]
    assert styled(found[1:2], "warn") == ["8 60/min"]


def test_the_limit_is_the_smaller_one_of_the_verb_and_the_file_of_keys() -> None:
    one = clients()[1]
    one.key_limit = KeyLimit(requests_per_minute=60, tokens_per_minute=90_000, concurrent=4)
    assert "4 60/min 90.0k tok/min" in texts([one], 120)[1] and styled([one], "warn") == [], "no operator has set them"
    one.most_open, one.per_minute, one.draining = 8, 30, True
    assert styled([one], "warn") == ["4 30/min drain 90.0k to…"], "the tokens yield at last"
    one.key_limit = KeyLimit(concurrent=9)
    assert styled([one], "warn") == ["8 30/min drain"]


def test_objectives_are_below_the_rows() -> None:
    slo = SloInfo(ttft_ms=200.0, itl_ms=50.0, finished=312, met=303, ttft_missed=7, itl_missed=4, goodput=303 / 312)
    blank, line = clients_page.slo_rows(Latency(slo=slo), 80)
    assert not text_of(blank).strip()
    assert text_of(line).rstrip() == (
        "  SLO 97% of 312 requests of 5 min: ttft 200ms missed by 7, itl 50ms missed by 4"
    )
    slo.ttft_missed, slo.itl_missed = 17, 14
    lines = clients_page.slo_rows(Latency(slo=slo), 80)[1:]
    assert " ".join(text_of(line).strip() for line in lines).endswith("missed by 17, itl 50ms missed by 14"), "not cut"
    assert all(width_of(text_of(line)) <= 80 and text_of(line).startswith("  ") for line in lines) and len(lines) == 2
    only = SloInfo(itl_ms=50.0)
    (_, line) = clients_page.slo_rows(Latency(slo=only), 80)
    assert text_of(line).rstrip() == "  SLO - of 0 requests of 5 min: itl 50ms missed by 0"
    assert clients_page.slo_rows(Latency(), 80) == []


async def test_enter_shows_the_requests_of_the_key() -> None:
    async with console(picture(*clients())) as rig:
        newer = copy.deepcopy(rig.source.picture)
        for number, request in enumerate(newer.requests):
            request.client = "batch" if number == 1 else "alice"
        newer.requests[0].id = "chatcmpl-trace-42-c0de"
        rig.source.send(newer)
        rig.app.tick()
        await rig.pilot.press("K", "down", "enter")
        assert not isinstance(rig.app.screen, ClientsScreen)
        model = rig.app.main.console.model
        assert model.state.filter == 'client="batch"'
        assert [one.id for one in newer.requests if model.state.wanted.matches(one)] == [newer.requests[1].id]
        await rig.pilot.press("escape", "slash", *"trace-42", "enter")
        assert [one.id for one in newer.requests if model.state.wanted.matches(one)] == ["chatcmpl-trace-42-c0de"]
        rig.app.tick()
        assert "…e-42-c0de" in rig.screen() and newer.requests[1].id not in rig.screen()


def test_one_client_has_no_sum_and_rates_are_unknown_at_first() -> None:
    assert len(texts(clients()[:1])) == 2
    known, unknown = clients()[0], clients()[2]
    assert texts([known, unknown])[1].split()[3] == "4.3", "the sum of those that are known"
    assert texts([unknown, unknown])[1].split()[3] == "-"


def test_what_should_be_zero_is_yellow() -> None:
    assert styled(clients()[:1], "warn") == ["2", "4", "17"]
    assert styled(clients()[1:2], "warn") == []
    assert styled([ClientInfo(key="a", route=CHAT, failed_total=1)], "warn") == ["1"]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_names_from_outside_break_no_column(width: int) -> None:
    found = [
        ClientInfo(key="k" * 200, route="/v1/" + "r" * 200, slow=3),
        ClientInfo(key="界" * 200, route="/" + "界" * 200, refused_total=123_456),
        ClientInfo(key="\x1b[2Jred\n\u202e", route="/v1/\x07bell\n", errors_total=99_999),
        ClientInfo(key="", route=""),
        ClientInfo(key="\u200b", route="/", requests_s=1e12, tokens_s=1e9, left_total=10**9),
    ]
    shown = texts(found, width)
    assert len(shown) == 7 and max(map(width_of, shown)) <= width
    assert all(text.isprintable() for text in shown)
    at = shown[0].index("OPEN")
    for line in shown[2:]:
        cells, before = 0, ""
        for char in line:
            if cells >= at:
                break
            before += char
            cells += width_of(char)
        assert cells == at and before.endswith(" "), "OPEN begins in the same cell of each row"
    assert "OPEN" in shown[0] and "TOK/S" in shown[0] and "red" in shown[4]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_each_title_has_a_legend(width: int) -> None:
    for title in texts(clients(), width)[0].split():
        assert any("clients screen" in section.title for section in help_page.find(title)), title


@pytest.mark.parametrize("width", [20, 80, 200])
def test_without_clients_a_line_says_how_to_get_some(width: int) -> None:
    (shown,) = texts([], width)
    assert width_of(shown) <= width and (width < 40 or shown == f"  {clients_page.NO_CLIENTS}")


@pytest.mark.parametrize("size", SIZES)
async def test_the_screen_has_its_key_and_its_name_and_follows(size: tuple[int, int]) -> None:
    async with console(picture(*clients()), size=size) as rig:
        await rig.pilot.press("K")
        assert isinstance(rig.app.screen, ClientsScreen)
        assert "alice" in rig.screen() and "embeddings" in rig.screen()
        newer = copy.deepcopy(rig.source.picture)
        newer.clients = [ClientInfo(key="carol", route=CHAT, open=7)]
        rig.source.send(newer)
        rig.app.tick()
        assert "carol" in rig.screen() and "alice" not in rig.screen()
        await rig.pilot.press("q")
        assert not isinstance(rig.app.screen, ClientsScreen)
        await rig.pilot.press(*":clients", "enter")
        assert isinstance(rig.app.screen, ClientsScreen)
        await rig.pilot.press("question_mark")
        assert "SLOW" in rig.screen() and "has not read" in rig.screen()
        await rig.pilot.press("escape", "escape")
        assert not isinstance(rig.app.screen, ClientsScreen)


@pytest.mark.parametrize("size", SIZES[:2])
async def test_verbs_act_on_the_selected_key(size: tuple[int, int]) -> None:
    async with console(picture(*clients()), size=size) as rig:
        await rig.pilot.press("K")
        assert [line[:7] for line in rig.screen().splitlines()[2:6]] == [" all   ", ">alice ", " batch ", " batch "]
        assert "X kick" in rig.screen()
        await rig.pilot.press("down")
        assert [line[0] for line in rig.screen().splitlines()[2:6]] == [" ", " ", ">", ">"], "a key has several routes"
        await rig.pilot.press("X")
        await rig.pilot.pause()
        assert "client batch" in rig.screen() and "kick batch" in rig.screen()
        await rig.pilot.press("escape", "up", "b")
        assert rig.app.screen.query_one(PromptLine).input.value == "limit alice "
        assert "limit CLIENT N|N/min|off" in rig.screen(), "the key line says what a limit is"
        await rig.pilot.press(*"8", "enter")
        assert "limit alice 8" in rig.screen() and "client alice" in rig.screen()
        await rig.pilot.press("escape", "B")
        assert "drain-client alice" in rig.screen()
        await rig.pilot.press("escape", "escape", "X")
        assert "and none is selected" not in rig.screen() and not isinstance(rig.app.screen, Confirm)


async def test_without_a_client_there_is_nothing_to_act_on() -> None:
    async with console(picture()) as rig:
        await rig.pilot.press("K", "X")
        assert "kick acts on a client, and none is selected" in rig.screen()


def test_a_snapshot_of_an_older_engine_has_no_clients() -> None:
    older = msgspec.to_builtins(picture(*clients()))
    del older["clients"]
    assert texts(msgspec.convert(older, Snapshot).clients) == [f"  {clients_page.NO_CLIENTS}"]


async def test_an_engine_without_clients_has_the_screen_too() -> None:
    async with console(snapshots.unknown()) as rig:
        await rig.pilot.press("K")
        assert clients_page.NO_CLIENTS in rig.screen()


def test_the_command_prints_the_page_and_its_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    cli = Cli(capsys, tmp_path)
    with FakeGateway(snapshot=picture(*clients())):
        done = cli("clients")
        assert done.code == 0 and "TTFT90" in done.out and "alice chat" in done.out
        found = json.loads(cli("clients", "--json").out)
    assert [each["route"] for each in found] == [CHAT, TEXT, "/v1/embeddings"]
    assert found[0]["ttft_ms"]["p99"] == 1840.0 and found[2]["requests_s"] is None
    with FakeGateway(snapshot=picture()):
        assert cli("clients").out.strip() == clients_page.NO_CLIENTS
        assert json.loads(cli("clients", "--json").out) == []
