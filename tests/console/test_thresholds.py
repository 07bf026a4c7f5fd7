"""Thresholds: the file, the alarms with their hysteresis, incidents, and the commands that they run."""

from __future__ import annotations

import asyncio
import copy
import sys

import msgspec
import pytest
import snapshots
from cli_helpers import Cli
from ppconsole.app import ConsoleApp
from ppconsole.link.alarm_commands import AlarmCommands
from ppconsole.link.config_file import ConfigFileError, config_path, read_config
from ppconsole.model.thresholds import METRICS, Alarm, AlarmConfig, OnIncident, Threshold, Watches
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.severity import level_of
from ppengine.protocol.snapshot import Event, IncidentInfo, Latency, Queues, Throughput
from test_tui_console import Clock, FakeSource, Rig

GOOD = """
[[thresholds]]
metric = "waiting"
above = 100
for_s = 3
clear_below = 80
bell = true
command = ["notify-send", "a b"]

[[thresholds]]
metric = "output_tok_s"
below = 5

[on_incident]
command = ["logger"]
"""


def picture(waiting: int = 0, rate: float = 100.0, incident: IncidentInfo | None = None):
    made = snapshots.snapshot(2, 2, queues=Queues(waiting=waiting), throughput=Throughput(output_tok_s=rate))
    made.incident = incident
    return made


def incident(number: int, over: float | None = None) -> IncidentInfo:
    return IncidentInfo(number=number, wall=1.0, over_wall=over, stage=1, cause="stopped", summary="stage 1 is stopped")


# --- the file -------------------------------------------------------------------------------------------------


def test_the_file_is_read_and_a_missing_one_configures_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_config(config_path()) == AlarmConfig()
    config_path().parent.mkdir()
    config_path().write_text(GOOD)
    made = read_config(config_path())
    assert made.thresholds[0] == Threshold(
        metric="waiting", above=100, for_s=3, clear_below=80, bell=True, command=["notify-send", "a b"]
    )
    assert made.on_incident == OnIncident(command=["logger"])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("above = 100", "abve = 100", "thresholds[0].abve is 100: no such key; the keys are metric, above, below"),
        ("above = 100", 'above = "many"', "thresholds[0].above is 'many': expected `float | null`, got `str`"),
        ('"waiting"', '"wating"', f"thresholds[0].metric is 'wating': it must be one of {', '.join(METRICS)}"),
        ("above = 100", "above = 100\nbelow = 3", "thresholds[0].above is 100.0: exactly one of above and below"),
        ("clear_below = 80", "clear_below = 101", "thresholds[0].clear_below is 101.0: it goes with above and must be"),
        ("below = 5", "below = 5\nclear_above = 4", "thresholds[1].clear_above is 4.0: it goes with below and must be"),
        ("for_s = 3", "for_s = -3", "thresholds[0].for_s is -3.0: it must be 0 to 3600 seconds"),
        ('["logger"]', '"logger"', "on_incident.command is 'logger': expected `array`, got `str`"),
        ('["logger"]', '["", "x"]', "on_incident.command is ['', 'x']: it must be a program and its arguments"),
        ("[on_incident]", "[on_incidents]", "on_incidents is {'command': ['logger']}: no such key; the keys are thres"),
        ("above = 100", "above = = 100", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_key_value_and_what_would_be_right(tmp_path, old, new, says):
    path = tmp_path / "config.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigFileError) as caught:
        read_config(path)
    assert str(caught.value).startswith(str(path)) and says in str(caught.value)
    assert "\n" not in str(caught.value)


# --- alarms ---------------------------------------------------------------------------------------------------


def run_through(threshold: Threshold, values: list[float | None], step: float = 1.0) -> list[tuple[int, bool]]:
    """Return the seconds at which the alarm was raised (True) or cleared."""
    clock, found = Clock(), []
    watches = Watches(AlarmConfig(thresholds=[threshold]), clock)
    for second, value in enumerate(values):
        made = picture(rate=value) if threshold.metric == "output_tok_s" else picture(waiting=value or 0)
        if value is None:
            made.throughput = Throughput()
        found += [(second, alarm.raised) for alarm in watches.look(made)]
        clock.now += step
    return found


def test_an_alarm_is_raised_after_its_time_and_cleared_below_its_clear_level():
    threshold = Threshold(metric="waiting", above=100, for_s=3, clear_below=80)
    assert run_through(threshold, [101] * 10) == [(3, True)]
    assert run_through(threshold, [101, 101, 101, 100] * 5) == [], "it was never above for three seconds"
    assert run_through(threshold, [101] * 5 + [81, 120] * 10) == [(3, True)], "between the levels nothing changes"
    assert run_through(threshold, [101] * 5 + [80] * 5) == [(3, True), (8, False)]
    assert run_through(threshold, [101] * 5 + [80, 90] * 9) == [(3, True)], "it was never clear for three seconds"


def test_a_level_below_and_figures_that_are_unknown():
    threshold = Threshold(metric="output_tok_s", below=5, clear_above=20, for_s=2)
    assert run_through(threshold, [4.0] * 4 + [19.0] * 5 + [20.0] * 4) == [(2, True), (11, False)]
    assert run_through(threshold, [4.0, 4.0, None, 4.0, 4.0, None]) == []


def test_the_time_to_first_token_has_a_threshold():
    clock = Clock()
    watches = Watches(AlarmConfig(thresholds=[Threshold(metric="ttft_p99_s", above=2.0, for_s=1)]), clock)
    slow, found = picture(), []
    slow.latency = Latency(ttft_s=Quantiles(p99=2.5))
    for made in (slow, slow, picture()):  # without a token in the window the figure is unknown
        found += [alarm.text for alarm in watches.look(made)]
        clock.now += 1.0
    assert found == ["ttft_p99_s is 2.5, above 2 for 1 s"]


def test_seconds_without_a_snapshot_do_not_count():
    assert run_through(Threshold(metric="waiting", above=1, for_s=15), [9] * 9, step=10.0) == []


def test_an_incident_is_raised_once_and_cleared_once():
    clock = Clock()
    watches = Watches(AlarmConfig(on_incident=OnIncident(command=["x"])), clock)
    seen = [
        picture(incident=incident(1, over=2.0)), picture(incident=incident(1, over=2.0)),
        *[picture(incident=incident(2))] * 3, *[picture(incident=incident(2, over=9.0))] * 3,
        picture(incident=incident(3, over=9.0)),
    ]  # fmt: skip
    found = [(alarm.incident, alarm.raised) for each in seen for alarm in watches.look(each)]
    assert found == [(2, True), (2, False), (3, True), (3, False)]
    late = Watches(AlarmConfig(), clock)
    assert [alarm.raised for alarm in late.look(picture(incident=incident(2)))] == [True], "it lasts at the attach"
    assert [(a.incident, a.raised) for a in late.look(picture(incident=incident(3)))] == [(2, False), (3, True)]


def test_an_incident_that_another_hides_for_a_while_is_raised_once_and_cleared_once():
    """A snapshot has the newest incident that lasts, and each cause beside the pipeline has one of its own."""
    watches = Watches(AlarmConfig(), Clock())
    stopped = msgspec.structs.replace(incident(1), cause="process", stage=None)
    ended = msgspec.structs.replace(stopped, over_wall=20.0, ended="nothing shows it any more")
    found = [
        [(alarm.incident, alarm.raised, alarm.value) for alarm in watches.look(picture(incident=each))]
        for each in (stopped, incident(2), incident(3), stopped, incident(3, over=9.0), ended)
    ]
    fault = "process: stage 1 is stopped"
    assert found[0] == [(1, True, fault)]
    assert [each[:2] for each in found[1]] == [(2, True)], "both last"
    assert [each[:2] for each in found[2]] == [(2, False), (3, True)], "a stage's comes after a stage's"
    assert [each[:2] for each in found[3]] == [(3, False)]
    assert [each[:2] for each in found[4]] == [(1, False)] and found[5] == []
    unseen = Watches(AlarmConfig(), Clock())
    found = [
        [(alarm.incident, alarm.raised) for alarm in unseen.look(picture(incident=each))]
        for each in (incident(2), stopped, ended)
    ]
    assert found == [[(2, True)], [(2, False), (1, True)], [(1, False)]]


# --- commands -------------------------------------------------------------------------------------------------


def alarm(*command: str, raised: bool = True, number: int | None = None, metric: str = "waiting") -> Alarm:
    return Alarm("thresholds[0]", metric, raised, "101", "text", False, command, number)


SHOW = "import os; print(*[os.environ['PPCONSOLE_' + n] for n in ('METRIC', 'VALUE', 'ENGINE', 'INCIDENT', 'STATE')])"


async def test_a_command_gets_its_figures_and_no_shell():
    said: list[tuple[str, bool]] = []
    commands = AlarmCommands(lambda text, failed: said.append((text, failed)))
    commands.run(alarm(sys.executable, "-c", SHOW, "$(id); `id`", number=7), "e1")
    await commands.finished()
    assert said == [(f"thresholds[0]: {sys.executable} ended with 0: waiting 101 e1 7 raised", False)]
    commands = AlarmCommands(lambda text, failed: said.append((text, failed)))
    commands.run(alarm("no-such-program; true"), "e1")
    await commands.finished()
    assert said[-1] == ("thresholds[0]: no-such-program; true cannot be run: No such file or directory", True)


async def test_a_command_that_hangs_is_killed_with_its_children(tmp_path):
    mark = tmp_path / "mark"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(mark)!r}).touch()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    said: list[str] = []
    commands = AlarmCommands(lambda text, failed: said.append(text), limit_s=0.8)
    commands.run(alarm(sys.executable, "-c", program), "e1")
    await commands.finished()
    assert said == [f"thresholds[0]: {sys.executable} was killed after 0.8 s"]
    await asyncio.sleep(2.0)
    assert not mark.exists()


async def test_one_command_runs_at_a_time_and_none_too_soon(tmp_path):
    out = tmp_path / "out"
    program = (
        "import os, sys, time\n"
        "def put(text): open(sys.argv[1], 'a').write(text)\n"
        "put('<' + os.environ['PPCONSOLE_STATE']); time.sleep(0.3); put('>')"
    )
    said: list[str] = []
    commands = AlarmCommands(lambda text, failed: said.append(text))
    for raised in (True, False, True, False):
        commands.run(alarm(sys.executable, "-c", program, str(out), raised=raised, number=7), "e1")
    await commands.finished()
    assert out.read_text() == "<raised><cleared>", "the second pair comes within a minute"
    assert any("no command, the last one began" in text for text in said)
    out.write_text("")
    for raised in (True, False) * 2:  # incidents are rare and each counts
        commands.run(alarm(sys.executable, "-c", program, str(out), raised=raised, number=1, metric="incident"), "e1")
    await commands.finished()
    assert out.read_text() == "<raised><cleared>" * 2


# --- the console ----------------------------------------------------------------------------------------------


async def console_with(config: AlarmConfig, source: FakeSource, *, read_only: bool = False):
    app = ConsoleApp(source, read_only=read_only, clock=Clock(), theme="pp-dark", alarms=config)
    return app, app.run_test(size=(120, 40))


@pytest.mark.parametrize(("live", "read_only"), [(True, False), (False, False), (True, True)])
async def test_a_threshold_marks_rings_and_runs_but_only_a_live_console_acts(tmp_path, live, read_only):
    out = tmp_path / "out"
    touch = ["sh", "-c", 'echo "$PPCONSOLE_METRIC $PPCONSOLE_STATE" >> "$0"; echo done', str(out)]
    config = AlarmConfig(
        thresholds=[Threshold(metric="waiting", above=100, for_s=2, bell=True, command=touch)],
        on_incident=OnIncident(command=touch, bell=True),
    )
    source = FakeSource(picture(), live=live)
    app, running = await console_with(config, source, read_only=read_only)
    rings: list[bool] = []
    app.alarms._ring = lambda: rings.append(True)
    async with running as pilot:
        rig = Rig(app, pilot, source, app._clock)
        await rig.until(lambda: app.model.state.snapshot is not None)
        for _ in range(4):
            rig.clock.now += 1
            source.send(copy.deepcopy(picture(waiting=150)))
            app.tick()
        await pilot.pause()
        assert " waiting above 100 " in rig.board("top") and "! waiting" not in rig.board("foot")
        assert "!waiting" in rig.board("left")
        assert "waiting is 150, above 100 for 2 s" in rig.board("left")
        source.send(picture(waiting=150, incident=incident(1)))
        acts = live and not read_only
        if acts:
            await rig.until(lambda: out.exists() and len(out.read_text().splitlines()) == 2)
            assert sorted(out.read_text().splitlines()) == ["incident raised", "waiting raised"]
            await rig.until(lambda: any("ended with 0: done" in each.text for each in app.model.state.events))
        else:
            await pilot.pause(0.5)
            assert not out.exists()
        assert len(rings) == (2 if acts else 0)
        for _ in range(4):
            rig.clock.now += 1
            source.send(picture(waiting=1, incident=incident(1)))
            app.tick()
        assert "above 100 " not in rig.board("top")


def test_the_level_of_an_alarm():
    levels = {"alarm.raised": "warning", "alarm.cleared": "info", "alarm.failed": "error", "alarm.command": "info"}
    for kind, level in levels.items():
        assert level_of(Event(seq=0, wall=0.0, kind=kind, text="")) == level


# --- without a screen -----------------------------------------------------------------------------------------


def test_watch_needs_a_file(cli: Cli, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = cli("watch", "--thresholds")
    assert done.code == 2 and "nothing to watch" in done.err and "config.toml" in done.err
    (tmp_path / "ppconsole").mkdir()
    (tmp_path / "ppconsole" / "config.toml").write_text("x = 1")
    done = cli("watch", "--thresholds")
    assert done.code == 2 and "x is 1: no such key" in done.err
