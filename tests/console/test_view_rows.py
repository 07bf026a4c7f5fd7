"""Rows of the main screen as text, at fixed widths and for fixed snapshots."""

from __future__ import annotations

import msgspec
import pytest
import rank_snapshots
import snapshots
from ppconsole.cli import render
from ppconsole.model.ranks import place_of
from ppconsole.model.reduce import set_filter
from ppconsole.model.request_fields import COLUMN_HELP, FIELDS, FINISHED_FIELDS, LETTERS, SHORT_HELP
from ppconsole.model.rows import visible_requests
from ppconsole.model.sorting import ARRIVAL, BY_ARRIVAL
from ppconsole.model.state import ConsoleState, Output
from ppconsole.view import (
    banner,
    board,
    diagnosis,
    drilldown,
    events,
    kvmap,
    meaning,
    pipeline,
    request_table,
    sort_menu,
    stage_detail,
    stage_requests,
    stage_rows,
    stage_table,
    timeline,
    wording,
)
from ppconsole.view.cells import cut, fit, id_text, text_of, width_of, wrap
from ppconsole.view.frame import frame
from ppconsole.view.stage_rows import RowKey
from ppengine.protocol.gpu import GpuInfo, GpuProcess, Xid
from ppengine.protocol.operation_kinds import Kind
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.recording import LinkState
from ppengine.protocol.snapshot import Event, Latency, SloInfo, Verdict, Why
from ppengine.protocol.stage_info import CordonInfo, StreamInfo
from rich.cells import cell_len

LIVE = banner.Link(state="live", age_s=0.1)


def texts(rows):
    return [text_of(line) for line in rows]


def table(picture, width, **more):
    state = ConsoleState(snapshot=picture)
    return texts(request_table.rows(state, visible_requests(state), width, **more))


@pytest.mark.parametrize(("name", "width"), [("r-0001", 84), ("r-0001", 38), ("chat-completion-17", 38)])
def test_the_legend_of_the_kv_map_is_whole(name, width):
    picture = snapshots.snapshot(4, 8)
    line = text_of(kvmap.rows(snapshots.blocks(picture, request="r-0001"), width, 20, name)[-1])
    assert "…" not in line and width_of(line) <= width
    assert all(word in line for word in ("used", "shared", "cached", "free", "█"))
    assert (name in line) == (len(name) < 10)


@pytest.mark.parametrize("size", [(74, 20), (86, 46), (74, 12), (54, 12)])
@pytest.mark.parametrize("fields", [FIELDS, FINISHED_FIELDS])
def test_no_meaning_in_the_sort_menu_is_cut(size, fields):
    columns = (ARRIVAL, *dict.fromkeys(field.name for field in fields.values()))
    shown = texts(sort_menu.rows(columns, BY_ARRIVAL, 3, *size))
    assert not any("…" in line for line in shown) and len(shown) <= size[1]
    assert all(any(f"{LETTERS[column]} {column}" in line for line in shown) for column in columns)
    everything = "\n".join(shown)
    if size[0] > 60:
        assert all(COLUMN_HELP[column] in everything or SHORT_HELP[column] in everything for column in columns)
    else:
        assert shown[0].startswith(f" sort by: {COLUMN_HELP[columns[3]]}")


@pytest.mark.parametrize("width", [80, 82])
def test_no_operation_of_a_stage_is_cut(width):
    """The right column leaves 82 cells of a terminal with 120."""
    picture = snapshots.snapshot(4, 8)
    for stage, op, name in zip(
        picture.stages, ("token_return<3 m1980", "receive<1 m7", "device m8", "receive<2 m9"),
        ("main", "main", "compute", "receive"), strict=True,
    ):  # fmt: skip
        stage.streams, stage.waiting_on = [StreamInfo(name=name, owner="main", op=op, age_ms=5.0)], None
    rows = texts(stage_table.rows(picture, width))
    for line, text in zip(rows[1:], ("token<3", "recv<1", "compute:gpu", "recv<2"), strict=True):
        assert f" {text} " in line


def test_stage_rows_at_80_columns():
    assert texts(stage_table.rows(snapshots.stuck(), 80, selected=RowKey(2))) == [
        "  STG S MEMORY    USED KV-USE/MAP/CAP  SWAP I>O    MB STEP IDLE STREAM:OP    AGE",
        "    0 B ████▒│···  56% 812/1024/1377*    12 0>4 …8412 22ms  21% p2p:send>1  6.2s",
        "    1 B ████▒│···  55% 812/1024/1414     12 1>4 …8411 23ms  24% p2p:send>2  6.2s",
        "!   2 X ████▒│···  55% 812/1024/1390     12 2>1 …8410 6.2s   0% comp:fwd    6.2s",
        "    3 S ████▒│···  54% 812/1024/1427     12 0>0     - 25ms  98% p2p:recv<2  6.2s",
    ]


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_stages_on_several_hosts_name_theirs_at_every_width(width):
    picture = snapshots.stuck()
    assert not any("HOST" in line for line in texts(stage_table.rows(picture, 80))), "one host needs no name at 80"
    for stage in picture.stages:
        stage.host = f"raycluster-worker-group-{stage.index}"
    head, *lines = texts(stage_table.rows(picture, width))
    assert head.split().index("HOST") == head.split().index("STG") + 2
    assert [f"oup-{index} " in line for index, line in enumerate(lines)] == [True] * 4, "names begin alike"
    assert head.count("HOST") == 1 and all(len(line) <= width for line in (head, *lines))


def test_a_cordon_is_told_without_colour_in_every_place():
    picture = snapshots.stuck()
    picture.stages[2].cordon = CordonInfo(by="eve", since_s=190.0, reason="fan")
    rows = texts(stage_table.rows(picture, 80, selected=RowKey(2)))
    assert rows[2:4] == [
        "    1 B  ████▒│···  55% 812/1024/1414     12 1>4 …411 23ms  24% p2p:send>2  6.2s",
        "!   2 X# ████▒│···  55% 812/1024/1390     12 2>1 …410 6.2s   0% comp:fwd    6.2s",
    ]
    assert text_of(banner.banner(picture, LIVE, 80)) == (
        " opt@n0  DEGRADED  CORDON 2  live 0.1s  RW  util .60 r7 step 18412 0 tok/s ops:0"
    )
    said = "stage 2 is cordoned by eve 3m10 (fan): no request begins"
    assert said in " ".join(" ".join(texts(stage_detail.rows(picture, 2, None, 80))).split())
    calm = msgspec.structs.replace(snapshots.snapshot(), stages=picture.stages, verdicts=[], operations=[])
    assert text_of(banner.verdict_line(calm, LIVE, 80)).strip() == said
    for stage in picture.stages:
        stage.cordon = CordonInfo(by="eve", since_s=1.0)
    assert " CORDON 4 STAGES " in text_of(banner.banner(picture, LIVE, 80))


def test_the_card_of_a_stage_shows_what_is_known_and_nothing_else():
    picture = snapshots.snapshot()
    assert not any(line.startswith(" GPU") for line in texts(stage_detail.rows(picture, 0, None, 80)))
    gpu = GpuInfo(
        uuid="GPU-b", age_ms=4200.0, problem="NVML has not answered power of GPU-b for 4 s", throttle=["thermal"],
        memory_used=60 * 2**30, memory_total=150 * 2**30, busy=0.37, sm_clock_mhz=1980, power_w=93.8,
        ecc_uncorrected=7, pcie_tx_bytes_s=5e9, xids=[Xid(code=79, age_ms=9000.0)],
    )  # fmt: skip
    assert [line.rstrip() for line in texts(stage_detail.gpu_rows(gpu, 80))] == [
        "  no answer     NVML has not answered power of GPU-b for 4 s",
        "  memory        60.0G of 150G           busy          37%",
        "  SM clock      1980 MHz                power         94 of ? W",
        "  temperature   ? °C                    ECC errors    ? corrected, 7 not",
        "  PCIe          out 4.7G/s in ?/s       NVLink        out ?/s in ?/s",
        "  figures' age  4.2s",
        "  held down by  thermal",
        "  XID           79, 9.0s ago",
    ]
    others = [
        GpuProcess(pid=picture.stages[0].pid, name="python3 ppengine.stage", bytes=12 * 2**30, sm=0.35),
        GpuProcess(pid=4242, name="python3 train\x07.py", bytes=60 * 2**30, sm=0.6),
        GpuProcess(pid=99),
    ]
    gpu = msgspec.structs.replace(gpu, processes=others)
    stage = picture.stages[0] = msgspec.structs.replace(picture.stages[0], gpu=gpu)
    rows = [row for row in stage_detail.rows(picture, 0, None, 80) if text_of(row).startswith("  on the card")]
    assert [text_of(row).strip() for row in rows] == [
        f"on the card   stage 0 (pid {stage.pid}): 12.0G, 35% of the SMs",
        "on the card   python3 train.py (pid 4242): 60.0G, 60% of the SMs",
        "on the card   a process that is not visible here (pid 99): ?",
    ]
    assert [row.segs[1][1] for row in rows] == ["", "warn", "warn"], "others stand out"
    assert any(line.startswith(" GPU") for line in texts(stage_detail.rows(picture, 0, None, 80)))


def test_request_rows_at_80_columns():
    assert table(snapshots.snapshot(4, 6), 80, selected="r-0003") == [
        "  REQ 6      OWNER    STATE   AGE    IN   OUT   BLK  SWP WHY                    ",
        "  r-0000     alice    run    5m00  1745   198   122    0 m18409 at stage 3      ",
        "  r-0001     bob      run    4m59   291   292    37    0 m18410 at stage 2      ",
        "  r-0002     eve      run    4m58  1973    29   126    0 m18411 at stage 1      ",
        "> r-0003     nightly… wait   4m57   503     0     0    0 need 121, have 100     ",
        "  r-0004     ci       run    4m57   499   156    41    0 m18409 at stage 3      ",
        "  r-0005     alice    swap   4m56  1291   131     0   89 need 89, have 100: swa…",
    ]


def test_pool_line():
    assert text_of(request_table.pool(snapshots.snapshot(), 80)) == (
        "POOL cached 102 free 110 │ wait 3 run 13 swap 2 held 2 load 0 │ fly m18409-12"
    )


def test_banner_and_verdict_at_80_columns():
    picture = snapshots.stuck()
    assert text_of(banner.banner(picture, LIVE, 80)) == (
        " opt@n0  DEGRADED  live 0.1s  RW  util .60 r7 step 18412 0 tok/s ops:0"
    )
    assert text_of(banner.verdict_line(picture, LIVE, 80)) == (
        "! STAGE 2 self_stuck 6.2s: attention of m18410 on comp; 0 to 1 bl… +1  d detail "
    )


@pytest.mark.parametrize(
    ("summary", "shown"),
    [
        (
            "stage 1 rank 1 is stopped by a signal (pid 26397, state T)",
            "stopped 2.3s: by a signal (pid 26397, state T)",
        ),
        ("stage 1 rank 1 was killed by SIGKILL", "stopped 2.3s: killed by SIGKILL"),
        ("stage 1 rank 1: no word from it", "stopped 2.3s: no word from it"),
        ("rank 1 is gone", "stopped 2.3s: rank 1 is gone"),
    ],
)
def test_the_verdict_line_names_the_stage_once_so_that_the_reason_fits(summary: str, shown: str) -> None:
    picture = rank_snapshots.dead()
    picture.verdicts[0].cause, picture.verdicts[0].summary = "stopped", summary
    assert text_of(banner.verdict_line(picture, LIVE, 80)).startswith(f"! STAGE 1 RANK 1 {shown}")


def test_a_stage_that_serves_again_is_not_shown_as_dead() -> None:
    """Its verdict is reported for a second longer, and its age counts on."""
    picture = rank_snapshots.dead()
    assert "! STAGE 1 RANK 1 dead 2.3s: killed by" in text_of(banner.verdict_line(picture, LIVE, 80))
    picture.engine.state = "serving"
    assert "! STAGE 1 RANK 1 dead 2.3s: killed by" in text_of(banner.verdict_line(picture, LIVE, 80))
    for stage in picture.stages:
        stage.state = "computing"
    line = text_of(banner.verdict_line(picture, LIVE, 80))
    assert "! STAGE 1 RANK 1 was dead 2.3s ago, serves again: killed by SIGKILL" in line


@pytest.mark.parametrize("cause", ["disk_full", "straggler", "out_of_files"])
def test_a_fault_that_stops_no_step_hides_none_that_does(cause):
    """A full disk or a slow stage may be an hour old when a stage is stopped."""
    picture = snapshots.stuck()
    picture.engine.state = "serving"
    picture.verdicts.append(Verdict(stage=None, cause=cause, summary="older", since_s=3600.0))
    assert text_of(banner.verdict_line(picture, LIVE, 80)).startswith("! STAGE 2 self_stuck 6.2s:")
    assert " STUCK " in text_of(banner.banner(picture, LIVE, 80))


def test_a_stage_that_serves_again_does_not_hide_a_dead_core():
    picture = snapshots.snapshot()
    picture.verdicts = [
        Verdict(stage=1, cause="dead", summary="stage 1 was killed by SIGKILL", since_s=8.2),
        Verdict(stage=None, cause="core", summary="the engine core was killed by SIGKILL", since_s=0.5),
    ]
    assert text_of(banner.verdict_line(picture, LIVE, 80)).startswith("! CORE 0.5s:")


@pytest.mark.parametrize(
    ("cause", "badge"),
    [("stopped", "STUCK"), ("gil_held", "STUCK"), ("core", "STUCK"), ("undetermined", "STUCK?"),
     ("straggler", "SLOW"), ("dead", "FAULT"), ("link", "FAULT"), ("non_finite", "FAULT")],
)  # fmt: skip
def test_the_badge_of_a_serving_engine_is_its_fault(cause, badge):
    """The core says `serving` as long as it may send steps, even to a stage that is stopped."""
    picture = snapshots.stuck()
    picture.engine.state = "serving"
    picture.verdicts[0].cause = cause
    assert f"opt@n0  {badge}  live" in text_of(banner.banner(picture, LIVE, 80))
    picture.engine.state = "degraded"
    assert "DEGRADED" in text_of(banner.banner(picture, LIVE, 80))
    picture.engine.state, picture.verdicts = "serving", []
    assert "SERVING" in text_of(banner.banner(picture, LIVE, 80))


@pytest.mark.parametrize("state", ["paused", "draining", "resizing"])
@pytest.mark.parametrize("cause", ["store", "straggler", "non_finite"])
def test_a_fault_with_which_steps_go_on_does_not_hide_the_state_of_a_verb(state, cause):
    """An operator who sees `STORE` over requests that wait would look for the reason in the store."""
    picture = snapshots.stuck()
    picture.verdicts, picture.engine.state = picture.verdicts[:1], state
    picture.verdicts[0].cause, picture.verdicts[0].root = cause, True
    assert f"opt@n0  {state.upper()}  live" in text_of(banner.banner(picture, LIVE, 80))
    assert f" {state.upper()} " in render.engine_line(picture)
    picture.verdicts[0].cause = "stopped"
    assert "opt@n0  STUCK  live" in text_of(banner.banner(picture, LIVE, 80))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_second_line_of_a_paused_engine_says_so_beside_the_fault_of_a_store(width):
    picture = snapshots.snapshot()
    picture.verdicts = [Verdict(stage=None, cause="store", summary="backend disk is full", since_s=9.0)]
    line = banner.verdict_line(picture, LIVE, width)
    assert text_of(line).startswith("! TIERS store 9.0s: backend disk is full")
    assert {style for _, style in line.segs} == {"alert.warn"}, "requests go on"
    assert (" STORE ", "chip.warn") in banner.banner(picture, LIVE, width).segs
    picture.engine.state, picture.engine.message = "paused", "paused by eve; resume goes on"
    line = text_of(banner.verdict_line(picture, LIVE, width))
    assert line.startswith("  paused by eve; resume") and line.endswith("  ! TIERS store  d detail ")
    assert width_of(line) == width


def test_rates_name_their_window_and_go_with_the_core():
    picture = snapshots.snapshot()
    picture.throughput.window_s = 2.04
    assert "812 tok/s 2s" in text_of(banner.banner(picture, LIVE, 120))
    assert "812 out 2140 in tok/s 2s" in text_of(banner.verdict_line(picture, LIVE, 120))
    picture.core_age_ms = 6000.0
    assert "? tok/s" in text_of(banner.banner(picture, LIVE, 120))


def test_what_is_narrow_loses_columns_by_priority():
    narrow = texts(stage_table.rows(snapshots.stuck(), 60))
    assert "STREAM:OP" in narrow[0] and "IDLE" not in narrow[0] and "SWAP" not in narrow[0]
    head = table(snapshots.snapshot(), 60)[0]
    assert "WHY" in head and "OWNER" not in head and "SWP" not in head
    wide = texts(stage_table.rows(snapshots.stuck(), 160))[0]
    assert "LAYERS" in wide and "DEVICE" in wide and "HOST" in wide


@pytest.mark.parametrize("width", [60, 80, 97, 120, 158, 200])
@pytest.mark.parametrize(
    "picture",
    [
        snapshots.unknown(),
        snapshots.snapshot(1, 0),
        snapshots.stuck(8, 5, 60),
        snapshots.snapshot(64, 30),
        snapshots.hostile(),
    ],
)
def test_no_row_is_wider_than_the_terminal(picture, width):
    state = ConsoleState(snapshot=picture, events=tuple(snapshots.events()))
    size = frame(width, 40, len(picture.stages), True, len(picture.requests))
    picked = board.Picked(picture.requests[0].id if picture.requests else None, RowKey(0), followed="r-1")
    lines = board.left(state, size, visible_requests(state), picked)
    assert max(width_of(text) for text in texts(lines)) <= size.left
    beside = board.right(state, size, 36, snapshots.blocks(picture), picked).rows
    assert all(width_of(text) <= size.side for text in texts(beside)) and len(beside) <= 36
    for line in (banner.banner(picture, LIVE, width), banner.verdict_line(picture, LIVE, width, [1.0, 5.0])):
        assert width_of(text_of(line)) <= width


def test_a_state_of_a_newer_engine_is_not_that_with_the_same_letter():
    picture = snapshots.snapshot(2, 0)
    stage = picture.stages[0]
    stage.state = "dreaming"
    assert texts(stage_table.rows(picture, 120))[1].split()[:2] == ["0", "dreaming"]
    pages = [pipeline.rows(picture, 80), stage_detail.rows(picture, 0, None, 80)]
    assert all("D dreaming" in "\n".join(texts(page)) for page in pages)
    assert meaning.of_stage(picture, stage).rows["D"] == "dreaming"


def test_unknown_is_a_question_mark_and_never_zero():
    row = texts(stage_table.rows(snapshots.unknown(), 80))[1]
    assert row.split()[:2] == ["0", "L"] and "?/?/?" in row and "0>0" not in row and "0%" not in row


def test_more_than_eight_stages_fold_and_the_faulty_one_stays():
    picture = snapshots.stuck(64, 41)
    rows = texts(stage_table.rows(picture, 80))
    assert len(rows) == 1 + 8
    assert any(row.startswith("!  41 X") for row in rows)
    assert rows[-1].strip().startswith("… 57 more: 35 B  22 S")


def test_the_worst_tensor_rank_stands_for_its_stage():
    picture = snapshots.snapshot(2, 0)
    picture.stages.append(snapshots.stage(1, 2, tensor_rank=1, state="dead"))
    shown, rest = stage_rows.fold(picture, 8)
    assert [place_of(each.info) for each in shown] == [(0, 0), (1, 1)] and not rest


def test_memory_bar_has_a_fixed_range():
    low, high = snapshots.stage(0), snapshots.stage(0)
    low.memory.used, high.memory.used = low.memory.total // 20, low.memory.total * 99 // 100
    text = ["".join(part for part, _ in stage_table.bar(each, 20)) for each in (low, high)]
    assert text[0].count("█") <= 1 and text[0][12] == "│"
    assert text[1].count("█") >= 14 and ("│", "bar.over") in stage_table.bar(high, 20)


def test_filter_shows_how_many_match():
    state = set_filter(ConsoleState(snapshot=snapshots.snapshot(4, 20)), "alice stat:run")
    rows = texts(request_table.rows(state, visible_requests(state), 80))
    assert rows[0].startswith("  REQ 2/20") and "/alice stat:run" in rows[0] and len(rows) == 3
    empty = set_filter(state, "nobody")
    assert "no request matches" in texts(request_table.rows(empty, visible_requests(empty), 80))[1]


def test_only_visible_requests_are_formatted():
    state = ConsoleState(snapshot=snapshots.snapshot(4, 1000))
    rows = texts(request_table.rows(state, visible_requests(state), 80, top=500, height=7))
    assert len(rows) == 8 and rows[1].split()[0] == "r-01f4"


def test_wide_and_invisible_characters_keep_columns():
    assert width_of("語") == 2 and width_of("\u0301") == 0
    assert fit("日本語テキスト", 7) == "日本語…" and width_of(fit("日本語テキスト", 8)) == 8
    picture = snapshots.snapshot(1, 2)
    picture.requests[0].owner = "日本語の人です"
    assert {width_of(line) for line in table(picture, 80)} == {80}


@pytest.mark.parametrize("text", ["日本👩\u200d🚀語テ", "❤\ufe0f❤\ufe0f", "e\u0301e\u0301日", "👩\u200d", "ascii only"])
def test_a_field_has_the_width_that_the_terminal_widgets_measure(text):
    for width in range(1, 12):
        for align in "<>":
            assert cell_len("|" + fit(text, width, align) + "|") == width + 2
        assert cell_len(cut(text, width)) <= width


def test_cut_and_wrap():
    assert cut("abcdef", 4) == "abc…" and cut("abc", 3) == "abc" and cut("abc", 0) == ""
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert wrap("a\nb", 4) == ["a", "b"]


def test_hostile_text_is_inert_in_every_row():
    picture = snapshots.hostile()
    state = ConsoleState(snapshot=picture, events=(Event(seq=1, wall=0, kind="x", text=snapshots.HOSTILE),))
    size = frame(120, 40, 2, True)
    lines = [
        *board.left(state, size, visible_requests(state), board.Picked()),
        banner.banner(picture, LIVE, 120), banner.verdict_line(picture, LIVE, 120),
        *diagnosis.page(picture, diagnosis.Known(), 80).rows, *stage_detail.rows(picture, 0, None, 80),
        *events.output("r-1", Output("r-1", snapshots.HOSTILE, prompt=snapshots.HOSTILE), "x", 80, 5),
    ]  # fmt: skip
    text = "".join(texts(lines))
    assert not set("\x1b\x07\n\r\t\u202e\u200b") & set(text)
    assert "[red]x[/red]" in text


def test_timeline_shows_micro_batches_and_idle():
    entries = [[3, 18412, 100.0, 50.0], [6, 18412, 50.0, 10.0]]
    assert "".join(glyph for glyph, _ in timeline.lane(entries, 200.0, 20)) == "          22222>····"
    picture = snapshots.snapshot(2, 0)
    assert text_of(timeline.rows(picture, stage_rows.fold(picture, 8)[0], 40)[0]).startswith(" TIMELINE  last 200 ms")


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.word not in ("idle", "step", "device", "mask")])
def test_each_operation_has_a_glyph_in_the_timeline(kind):
    cells = timeline.lane([[kind.value, 7, 100.0, 100.0]], 100.0, 4)
    assert len(set(cells)) == 1 and cells[0][0] not in (timeline.IDLE, timeline.UNKNOWN)


def test_the_timeline_keeps_its_scale_whatever_the_stages_report():
    """The span followed the oldest report, and the lanes jumped with each sample."""
    for span, cell in ((50.0, "0.625"), (200.0, "2.5"), (10_000.0, "125")):
        heads = set()
        for oldest in (10.0, 190.0, 9000.0):
            picture = snapshots.snapshot(2, 0)
            picture.stages[0].timeline = [[3, 7, oldest, 5.0]]
            heads.add(text_of(timeline.rows(picture, stage_rows.fold(picture, 8)[0], 84, span)[0]))
        assert len(heads) == 1 and f"{cell} ms a cell  z Z zoom" in heads.pop()
    narrow = text_of(timeline.rows(picture, stage_rows.fold(picture, 8)[0], 30, 500.0)[0])
    assert narrow == " TIMELINE  last 500 ms    now "


def test_the_legend_of_the_timeline_has_its_commonest_glyphs():
    assert text_of(timeline.legend(38)) == " 0-9 micro-batch <wait >send ·idle"
    assert all(part in text_of(timeline.legend(84)) for part in timeline.LEGEND)


def test_a_device_at_work_is_seen_where_its_host_merely_waits():
    launched, sent, waits = [3, 13, 100.0, 20.0], [6, 13, 80.0, 10.0], [1, 14, 70.0, 70.0]
    cells = timeline.lane([launched, sent, [17, 12, 150.0, 60.0], [17, 13, 90.0, 60.0], waits], 200.0, 20)
    assert "".join(glyph for glyph, _ in cells) == "     2222233>3333<<<"


def test_the_right_column_has_the_numbers_of_the_pool_and_uses_its_room():
    picture = snapshots.snapshot(4, 8)
    state = ConsoleState(snapshot=picture, events=tuple(snapshots.events()))
    size = frame(200, 50, 4, True, 8)
    kv = picture.stages[0].kv_blocks
    made = texts(board.right(state, size, 46, snapshots.blocks(picture), board.Picked(stage=RowKey(2))).rows)
    head = next(line for line in made if "KV MAP" in line)
    assert f": {kv.used} used, {kv.cached} cached, {kv.free} free" in head
    tables = [line.split()[1] for line in made if line.rstrip().endswith("STREAMS")]
    assert tables[0] == "2" and len(tables) > 1, "rows that the map does not need have other stages"
    assert sum(not line.strip() for line in made) < 6 and len(made) <= 46
    halted = snapshots.stuck()
    at = next(verdict.stage for verdict in halted.verdicts if verdict.root)
    made = texts(board.right(ConsoleState(snapshot=halted), size, 46, snapshots.blocks(halted), board.Picked()).rows)
    assert [line.split()[1] for line in made if line.rstrip().endswith("STREAMS")][:2] == ["0", str(at)]
    middle = text_of(kvmap.rows(snapshots.blocks(picture), 56, 12, None, kv)[0])
    assert middle.rstrip() == f" KV MAP  {kv.used} used, {kv.cached} cached, {kv.free} free; 1 a cell"
    narrow = texts(kvmap.rows(snapshots.blocks(picture), 38, 12, None, kv))
    assert narrow[0].rstrip() == f" KV MAP {kv.used} used {kv.cached} cached {kv.free} free"
    smallest = text_of(kvmap.rows(snapshots.blocks(picture), 34, 12, None, kv)[0])
    assert smallest.rstrip().endswith("a cell"), "without room it has the size alone"


def test_kv_map_lights_the_selected_request():
    runs = [(1, "null"), (3, "used"), (2, "shared"), (2, "free")]
    detail = kvmap.BlocksDetail(mapped=8, runs=runs, request="r-1", mine=[1, 2, 4, 99])
    assert "".join(glyph for glyph, _ in kvmap.cells(detail, 99, "r-1")) == "×██■█▓··"
    assert "".join(glyph for glyph, _ in kvmap.cells(detail, 99, "r-2")) == "×■■■▓▓··", (
        "of another request than is selected"
    )
    endless = kvmap.BlocksDetail(mapped=8, runs=[(10**15, "used"), (10**15, "free")])
    assert len(kvmap.cells(endless, 5)) == 5
    assert "8 blocks, 1 a cell" in text_of(kvmap.rows(detail, 40, 6)[0])
    large = snapshots.blocks(snapshots.snapshot(), 100_000, cells=kvmap.room(40, 12))
    assert len(kvmap.rows(large, 40, 12)) == 12 and "264 a cell" in text_of(kvmap.rows(large, 40, 12)[0])


def test_request_detail_has_the_numbers():
    info = snapshots.request(3)
    found = snapshots.detail(info)
    found.priority = -7
    text = "\n".join(texts(drilldown.request_rows(info, found, "", 80)))
    assert "priority      -7" in text and "bad words" not in text
    assert "finished      -" in text, "it runs: `?` is for figures that are not known"
    assert "need 121, have 100" in text and "503 tokens" in text and "no device blocks" in text
    found.bad_words = ["king", "a\x1b[31m queen"]
    assert '  bad words     "king" "a queen"' in texts(drilldown.request_rows(info, found, "", 80))
    gone = texts(drilldown.request_rows(None, None, "NOT_FOUND", 80))
    assert "NOT_FOUND" in gone[0] and "not in the engine" in gone[1]


def test_link_states_in_words():
    picture = snapshots.snapshot()
    lost = banner.Link(state="lost", age_s=12.0, retry_in_s=2.0)
    assert "lost 12s retry 2.0s" in text_of(banner.banner(picture, lost, 80))
    assert "figures are 12s old, verbs are off" in text_of(banner.verdict_line(picture, lost, 80))
    frozen = banner.Link(state="live", age_s=0.1, frozen_s=3.0, read_only=True)
    top = text_of(banner.banner(picture, frozen, 80))
    assert "FROZEN 3.0s" in top and " RO " in top


@pytest.mark.parametrize(
    ("width", "height", "count"), [(60, 16, 64), (80, 24, 2), (80, 24, 8), (120, 36, 4), (200, 50, 64)]
)
def test_the_frame_uses_every_row(width, height, count):
    for wanted in (True, False):
        for number in (0, 3, 200):
            size = frame(width, height, count, wanted, number)
            assert size.stages + size.requests + size.trends + size.events + size.output + 7 == height
            assert min(size.stages, size.requests, size.events, size.output) >= 1
            assert size.left + size.side + (1 if size.side else 0) == width


def test_a_process_beside_the_pipeline_is_named_and_comes_behind_a_stage():
    summary = "http0 (HTTP process, pid 7) is stopped by a signal (state T)"
    process = Verdict(stage=None, cause="process", subject="http0", summary=summary, since_s=3.0)
    picture = snapshots.snapshot(2, 0, verdicts=[process])
    assert " PROCESS " in text_of(banner.banner(picture, LIVE, 80))
    line = text_of(banner.verdict_line(picture, LIVE, 80))
    assert line.startswith("! HTTP0 ") and "http0 (HTTP process, pid 7) is stopped" in line
    title = "".join(text for text, _ in banner.fault_segs(picture, LIVE, 40))
    assert title.startswith(" ! HTTP0 ")
    picture.verdicts.append(Verdict(stage=1, cause="straggler", summary="stage 1 is slow", since_s=1.0))
    assert " SLOW " in text_of(banner.banner(picture, LIVE, 80))


def test_what_is_old_says_so():
    picture = snapshots.snapshot(2, 0, core_age_ms=3200.0)
    picture.stages[1].sample_age_ms = 5000.0
    rows = stage_table.rows(picture, 80)
    assert text_of(rows[2]).startswith("~   1 R") and {style for _, style in rows[2].segs} == {"warn", "dim"}
    assert "core silent 3.2s" in text_of(banner.banner(picture, LIVE, 100))
    line = text_of(banner.verdict_line(picture, LIVE, 80))
    assert line.startswith("! no samples of stage 1 for 5.0s: the agent may hang (l logs)")
    picture.stages[1].state = "loading"
    assert "no samples" not in text_of(banner.verdict_line(picture, LIVE, 80)), "its next process is not there yet"


def test_an_operation_under_way_is_seen():
    line = text_of(banner.verdict_line(snapshots.resizing(), LIVE, 80))
    assert line.strip() == "set-memory by eve: moved 31 of 80"


def test_an_operation_is_short_where_it_is_narrow():
    stage = snapshots.stage(1, 4, streams=[], op="receive<0 m18411", waiting_on=None)
    assert wording.operation(stage) == "recv<0 m18411" and wording.operation(stage, brief=True) == "recv<0"
    stage.op = "token_return m7"
    assert wording.operation(stage) == "token m7"
    stage.op = None
    assert wording.operation(stage) == "-"


def latencies(p99=1.5, **fields):
    times = Quantiles(p50=0.12, p90=0.4, p99=p99, count=9)
    return Latency(ttft_s=times, itl_ms=Quantiles(p50=22.0, p90=30.0, p99=41.0, count=99), queue_s=times, **fields)


@pytest.mark.parametrize(
    ("width", "end"),
    [
        (175, "p50 p90 p99 TTFT 120ms 400ms 1.5s ITL 22ms 30ms 41ms QUEUE 120ms 400ms 1.5s  preempted 3"),
        (145, "p50 p90 p99 TTFT 120ms 400ms 1.5s ITL 22ms 30ms 41ms  preempted 3"),
        (124, "p50 p90 p99 TTFT 120ms 400ms 1.5s  preempted 3"),
        (115, "  TTFT 120ms 400ms 1.5s  preempted 3"),
        (107, "TTFT p99 1.5s  preempted 3"),
        (90, "preempted 3"),
    ],
)  # fmt: skip
def test_the_pool_line_has_the_quantiles_that_fit(width, end):
    found = text_of(request_table.pool(snapshots.snapshot(latency=latencies()), width))
    assert found.endswith(end) and found.count("p99") == end.count("p99") and width_of(found) == width


def test_without_latencies_the_pool_line_has_none():
    assert "p99" not in text_of(request_table.pool(snapshots.snapshot(), 200))


def test_latencies_are_columns_of_a_wide_table():
    picture = snapshots.snapshot(requests=1)
    one = picture.requests[0]
    one.queue_s, one.ttft_s, one.itl_ms = 0.0123, 2.5, 33.3
    state = ConsoleState(snapshot=picture)
    wide, narrow = (texts(request_table.rows(state, picture.requests, width)) for width in (115, 81))
    assert wide[0].split()[9:12] == ["QUEUE", "TTFT", "ITL"] and wide[1].split()[8:11] == ["12ms", "2.5s", "33ms"]
    assert "TTFT" not in narrow[0]
    one.queue_s = one.ttft_s = one.itl_ms = None
    assert texts(request_table.rows(state, picture.requests, 115))[1].split()[8:11] == ["-", "-", "-"]


def test_a_stage_lists_the_requests_with_most_blocks():
    picture = snapshots.snapshot(4, 9)
    for index, request in enumerate(picture.requests):
        request.blocks = (0, 7, 126, 3, 41, 41, 90, 2, 5)[index]
    picture.stages[2].memory.kv_mapped, picture.stages[2].kv_blocks.mapped = 1024 * 2**16, 1024
    for width in (60, 80, 200):
        shown = [text_of(line) for line in stage_requests.rows(picture, picture.stages[2], width)]
        assert "as many on every stage" in shown[0] and all(width_of(line) <= width for line in shown)
        assert [line.split()[0] for line in shown[2:7]] == ["r-0002", "r-0006", "r-0004", "r-0005", "r-0001"]
        assert "126" in shown[2].split() and "7.9M" in shown[2].split(), "126 blocks of 64 KiB"
        assert "and 3 more" in shown[7] and len(shown) == 8
    picture.requests = picture.requests[:1]
    assert "no request holds blocks" in text_of(stage_requests.rows(picture, picture.stages[2], 80)[1])


@pytest.mark.parametrize(("goodput", "shown"), [(0.974, "slo 97%"), (None, "slo -"), (1.0, "slo 100%")])
def test_goodput_is_in_banner_and_status_if_the_profile_has_objectives(goodput, shown):
    slo = SloInfo(ttft_ms=200.0, finished=312, ttft_missed=8, goodput=goodput)
    picture = snapshots.snapshot(2, 3, latency=Latency(slo=slo))
    assert f" {shown} " in text_of(banner.banner(picture, LIVE, 80))
    (line,) = [line for line in render.status_lines(picture) if line.startswith("SLO")]
    assert line == f"SLO {shown.split()[1]} of 312 requests of 5 min: ttft 200ms missed by 8"
    plain = snapshots.snapshot(2, 3)
    assert " slo " not in text_of(banner.banner(plain, LIVE, 120))
    assert not any(line.startswith("SLO") for line in render.status_lines(plain))


def test_figures_above_an_objective_are_yellow():
    slo = SloInfo(ttft_ms=200.0, itl_ms=50.0)
    figures = [{"ttft_s": 0.2, "itl_ms": 50.1}, {"ttft_s": 0.21, "itl_ms": 50.0}, {}]

    def yellow(latency):
        picture = snapshots.snapshot(2, 0, latency=latency)
        picture.requests = [snapshots.request(number, **each) for number, each in enumerate(figures)]
        state = ConsoleState(snapshot=picture)
        lines = request_table.rows(state, visible_requests(state), 160)[1:]
        return [[text.strip() for text, style in line.segs if style == "warn" and "ms" in text] for line in lines]

    assert yellow(Latency(slo=slo)) == [["50ms"], ["210ms"], []]
    assert yellow(Latency()) == [[], [], []]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("r-8f2c", "r-8f2c"),
        ("cmpl-12345", "cmpl-12345"),
        ("chatcmpl-3db0bdf8b2a1", "…0bdf8b2a1"),
        ("chatcmpl-trace-42-c0de.1", "…42-c0de.1"),
        ("resp_3db0bdf8b2a1", "…0bdf8b2a1"),
        ("a-long-id-of-a-user", "a-long-id-of-a-user"),
    ],
)
def test_ids_over_http_show_their_end(name, shown):
    """All of them begin alike; other ids keep their beginning, which their user chose."""
    assert id_text(name, 10) == shown


def test_a_log_of_two_lines_has_the_fault_and_one_line_for_all_that_it_starves():
    texts_of = {
        "verdict.raised": [
            "stopped: stage 1 rank 0 is stopped by a signal (pid 7, state T)",
            "starved: stage 0 rank 0 is starved by stage 1 rank 0: token_return from 1 m188 for 0.6s",
            "starved: stage 0 rank 1 is starved by stage 1 rank 0 through stage 0 rank 0: all_reduce",
            "starved: stage 1 rank 1 is starved by stage 1 rank 0: all_reduce with rank 0 m189 for 0.6s",
        ],
    }
    raised = [
        Event(seq=seq, wall=1.7e9, kind=kind, text=text)
        for kind, found in texts_of.items() for seq, text in enumerate(found)
    ]  # fmt: skip
    assert [line[14:].rstrip() for line in texts(events.tail(raised, 80, 2))] == [
        "E stopped: stage 1 rank 0 is stopped by a signal (pid 7, state T)",
        "W starved: stages 0.0, 0.1 and 1.1",
    ]
    cleared = [
        Event(
            seq=seq,
            wall=1.7e9,
            kind="verdict.cleared",
            text="over: " + text.replace(":", f", reported for {seq}.1s:", 1),
        )
        for seq, text in enumerate(texts_of["verdict.raised"][1:])
    ]
    assert [line[14:].rstrip() for line in texts(events.tail(cleared, 80, 2))] == [
        "● over: starved: stages 0.0, 0.1 and 1.1"
    ]


def test_requests_that_a_restart_hit_are_one_line_of_the_log():
    restart = Event(seq=1, wall=1.7e9, kind="stage.restart", text="stage 1 restarted, generation 2")
    hit = [
        Event(seq=seq, wall=1.7e9, kind="request.preempted", request=f"r-{seq}",
              text=f"r-{seq} stage 1 was restarted: {seq} blocks dropped, to be recomputed")
        for seq in range(2, 14)
    ]  # fmt: skip
    by_hand = Event(seq=20, wall=1.7e9, kind="request.preempted", text="r-2 preempt", request="r-2", by="eve")
    assert [line[14:].rstrip() for line in texts(events.tail([restart, *hit, by_hand], 80, 3))] == [
        "W stage 1 restarted, generation 2",
        "● 12 requests: stage 1 was restarted: to be recomputed",
        "● eve r-2 preempt",
    ]


def test_many_submissions_are_one_line_of_the_log():
    sent = [
        Event(seq=seq, wall=1.7e9, kind="op.applied", by="eve", text=f"submit r-{seq}: 8 prompt tokens queued")
        for seq in range(1, 21)
    ]
    started = Event(seq=0, wall=1.7e9, kind="stage.ready", text="stage 1 is ready")
    assert [line[14:].rstrip() for line in texts(events.tail([started, *sent], 80, 2))] == [
        "● stage 1 is ready",
        "● eve submitted 20 requests",
    ]
    sent[3].by = "bob"
    assert "submitted 20 requests by 2 users" in texts(events.tail(sent, 80, 2))[0]
    assert len(events.tail(sent[:3], 80, 5)) == 3


def test_an_end_with_its_reason_in_words_is_counted_by_the_first_word():
    ends = [
        Event(seq=seq, wall=1.7e9, kind="request.finished", request=f"r-{seq}",
              text=f"r-{seq} length: the model's limit of 1024 tokens, 857 tokens")
        for seq in range(9)
    ]  # fmt: skip
    assert texts(events.tail(ends, 80, 2))[0].rstrip().endswith("9 requests ended: 9 length")


def test_a_console_without_an_engine_offers_no_prompt_and_invents_no_age():
    lost = banner.Link("lost", None, text="engine far does not answer")
    assert "there are no figures yet, verbs are off" in text_of(banner.verdict_line(None, lost, 120))
    assert "figures are 3.0s old" in text_of(banner.verdict_line(snapshots.snapshot(), lost._replace(age_s=3.0), 120))
    state = ConsoleState(snapshot=snapshots.snapshot(4, 0), link=LinkState(state="ended", text="stopped by root"))
    assert "i writes a prompt" not in texts(request_table.rows(state, [], 80))[1]
    assert " RO " in text_of(banner.banner(state.snapshot, banner.Link("ended"), 80))


def test_the_log_counts_ends_of_requests_and_keeps_the_line_of_the_fault_in_view():
    fault = Event(seq=1, wall=1.7e9, kind="stage.dead", text="stage 1 is dead")
    reasons = ("stop", "abort by eve", "length")
    ends = [
        Event(
            seq=seq,
            wall=1.7e9,
            kind="request.finished",
            text=f"r-{seq} {reasons[seq % 3]}, 4 tokens",
            request=f"r-{seq}",
        )
        for seq in range(2, 32)
    ]
    shown = [line[14:] for line in texts(events.tail([fault, *ends], 80, 6))]
    assert [line.rstrip() for line in shown] == [
        "E stage 1 is dead",
        "● 29 requests ended: 9 abort, 10 length, 10 stop",
        "● r-31 abort by eve, 4 tokens",
    ]
    flat = [line[14:].rstrip() for line in texts(events.tail([fault, *ends], 80, 2))]
    assert flat == ["E stage 1 is dead", "● 30 requests ended: 10 abort, 10 length, 10 stop"], "at two rows, too"
    few = texts(events.tail([fault, *ends[:2]], 80, 6))
    assert len(few) == 3 and "r-2" in few[1] and "r-3" in few[2], "a few are shown as they are"


def test_a_reason_names_another_request_by_the_end_of_its_id_as_the_column_does():
    first, second = "cmpl-7f48fbe35b83", "chatcmpl-0123456789abcdef"
    picture = snapshots.snapshot(2, 2)
    why = Why(code="behind", text=f"behind {first}: need 121, have 100")
    picture.requests[0] = msgspec.structs.replace(picture.requests[0], id=first)
    picture.requests[1] = msgspec.structs.replace(
        picture.requests[1], id=second, state="waiting", in_flight=[], why=why
    )
    _, one, other = (line.rstrip() for line in table(picture, 80)[:3])
    assert "…8fbe35b83" in one and "…789abcdef" in other
    assert "behind …e35b83: need" in other
