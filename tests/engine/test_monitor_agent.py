"""The agent against a real small process that writes a ring: stops, deaths, restarts, stack_dumps, resident memory."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from threading import Thread

import pytest
import zmq
from monitor_helpers import TRIES, make_config, remove, sample, started, until
from ppengine.agent import stack_dumps
from ppengine.agent.agent import CALM_S, Sampler, StackServer, is_calm
from ppengine.agent.process_watch import OomKills
from ppengine.agent.stack_dumps import Ability
from ppengine.agent.stage_watch import RingFile, StageWatch
from ppengine.common import procfs
from ppengine.common.ptrace_pauses import PtracePauses
from ppengine.common.ring import MAP_RING, Kind, RingWriter, Word
from ppengine.common.ring.layout import DEFAULT_CAPACITY
from ppengine.drills.tracer import Tracer
from ppengine.protocol import frames
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.inspection import StacksDetail
from ppengine.protocol.reports import ToCollector

PAGE = 4096
STAGE = textwrap.dedent("""
    import ctypes, faulthandler, mmap, signal, sys, time
    from pathlib import Path
    from ppengine.common.ring import Gauge, Kind, Phase, RingWriter

    path, stage = Path(sys.argv[1]), int(sys.argv[2])
    path.unlink(missing_ok=True)
    kv = mmap.mmap(-1, 1 << 20)
    kv[: 64 * 4096] = bytes(64 * 4096)
    ring = RingWriter(path, "main", stage, 0)
    for gauge, value in ((Gauge.TOTAL_BYTES, 1 << 26), (Gauge.KV_LENGTH, 1 << 20), (Gauge.KV_MAPPED_BYTES, 1 << 20)):
        ring.gauge(gauge, value)
    ring.gauge(Gauge.KV_BASE, ctypes.addressof(ctypes.c_char.from_buffer(kv)))
    stack = open(sys.argv[3], "a")
    faulthandler.register(signal.SIGUSR2, file=stack)
    ring.phase(Phase.SERVING)

    def waiting_in_a_function_of_its_own():
        print("ready", flush=True)
        step = 0
        while True:
            step += 1
            whole = ring.begin(Kind.STEP, step=step, size=4, detail=40)
            work = ring.begin(Kind.FORWARD, step=step, size=4)
            time.sleep(0.002)
            ring.end(work)
            ring.end(whole)
            ring.gauge(Gauge.STEP_BEGUN, step)
            ring.gauge(Gauge.STEP_FINISHED, step)
            ring.tick()
            idle = ring.begin(Kind.IDLE)
            time.sleep(0.002)
            ring.end(idle)

    waiting_in_a_function_of_its_own()
""")


@pytest.fixture
def config():
    made = make_config()
    yield made
    remove(made)


@contextlib.contextmanager
def stage_process(config, stage=0):
    paths = [f"{config.ring_dir}/s{stage}.0.main.ring", str(stage), f"{config.run_dir}/s{stage}.0.stack"]
    process = subprocess.Popen([sys.executable, "-c", STAGE, *paths], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def agent(config):
    """Run the real agent; yield (process, end of its lifeline, socket that gets its reports)."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.linger = 0
        pull.bind(config.endpoint("collect"))
        with started("ppengine.agent", config) as (process, line):
            yield process, line, pull


def reports(pull):
    codec = frames.Codec(ToCollector)
    while True:
        assert pull.poll(20_000), "the agent says nothing"
        yield codec.decode(pull.recv())


def first(pull, wanted, timeout=60.0):
    """Return the first report whose stage 0 is as wanted, and the seconds until the agent made it."""
    begin, stream = time.monotonic(), reports(pull)
    while True:
        report = next(stream)
        if report.stages and wanted(report.stages[0]):
            return report, report.mono_ns / 1e9 - begin
        assert time.monotonic() - begin < timeout, report


def test_what_the_agent_sees_of_a_stage_at_work(config):
    with stage_process(config) as process, agent(config) as (_, _, pull):

        def working(seen):  # as it is when nothing else runs here
            known = None not in (seen.step_ms_p50, seen.kv_resident, seen.cpu) and seen.begun_step > 20
            return known and seen.step_ms_p50 < 20.0 and seen.progress_age_ms < 200

        report, _ = first(pull, working)
        seen = report.stages[0]
        assert (seen.index, seen.pid, seen.phase) == (0, process.pid, "serving")
        assert seen.process_state in "RS" and seen.process_start == procfs.read_stat(process.pid).start
        assert seen.step_ms_p50 >= 2.0 and 0.1 < seen.idle_fraction < 0.9
        assert seen.op in ("idle", "forward", "step", None)
        assert seen.gauges["total_bytes"] == 1 << 26
        assert 64 * PAGE <= seen.kv_resident < 1 << 20
        assert seen.timeline and seen.work_ms[0][0] == 4
        assert [stream.name for stream in seen.streams] == ["main"]
        assert seen.main_state in "RS" and seen.wchan is not None and seen.last_op in ("forward", "idle")
        assert 0 <= seen.cpu.user < 1 and seen.cpu.main_user <= seen.cpu.user + 0.02


def test_it_reports_in_the_rhythm_of_a_calm_engine(config):
    with stage_process(config), agent(config) as (_, _, pull):
        stream = reports(pull)
        next(stream)
        spans = []
        while len(spans) < TRIES and not any(near(span) for span in spans):
            times = [next(stream).mono_ns for _ in range(6)]
            spans.append((times[-1] - times[0]) / 1e9)
        assert near(spans[-1]), spans


def near(span):
    """Return whether five intervals took about as long as they should."""
    return 4 * CALM_S < span < 6 * CALM_S


def test_a_stop_and_a_kill_are_seen_at_the_next_look(config):
    tries = []
    while len(tries) < TRIES and not any(max(one) < CALM_S + 0.1 for one in tries):
        tries.append(stop_and_kill(config))
    assert max(tries[-1]) < CALM_S + 0.1, tries


def stop_and_kill(config):
    """Return after how many seconds the agent says of a stage that it is stopped, and that it is dead."""
    with stage_process(config) as process, agent(config) as (_, _, pull):
        first(pull, lambda s: s.pid == process.pid and s.process_state in ("R", "S"))
        os.kill(process.pid, signal.SIGSTOP)
        report, stopped = first(pull, lambda s: s.process_state == "T")
        frozen = report.stages[0].begun_step
        report, _ = first(pull, lambda s: s.progress_age_ms > 250)
        assert report.stages[0].begun_step == frozen
        os.kill(process.pid, signal.SIGCONT)
        first(pull, lambda s: s.process_state != "T" and s.begun_step > frozen)
        os.kill(process.pid, signal.SIGKILL)
        _, killed = first(pull, lambda s: s.process_state in (None, "Z"))
        return stopped, killed


def test_a_restarted_stage_is_followed_to_its_new_ring(config):
    sampler = Sampler(config)
    with stage_process(config) as old:
        assert sampler.look().stages[0].pid == old.pid
    assert sampler.look().stages[0].process_state is None
    with stage_process(config) as new:
        seen = sampler.look().stages[0]
        assert seen.pid == new.pid and seen.process_state is not None and sampler.pids == {(0, 0): new.pid}
    Path(config.ring_dir, "s0.0.main.ring").unlink()
    assert sampler.look().stages == []


def test_time_without_a_core_is_excused_by_a_full_host_of_the_same_moment(config, monkeypatch):
    """The agent was stopped meanwhile, or had no core itself; no processor has idled."""
    waited_ns = 0
    monkeypatch.setattr(procfs, "waited_ns", lambda pid, *thread: waited_ns)
    monkeypatch.setattr(procfs, "idle_s", lambda usable: 5.0)
    with stage_process(config):
        sampler = Sampler(config)
        sampler.look()
        time.sleep(1.1)
        waited_ns = 1_000_000_000
        (seen,) = sampler.look().stages
        assert seen.starved is None


def test_an_agent_that_loses_its_core_while_it_reads_sees_no_old_state_as_lasting(tmp_path, monkeypatch):
    path = tmp_path / "main.ring"
    ring = RingWriter(path, "main", 0, 0)
    ring.end(ring.begin(Kind.FORWARD))
    watch = StageWatch(0, 0)
    watch.update({"main": (path, 1)})
    read, reads = RingFile.read, []

    def late(file):
        read(file)
        reads.append(file)
        if len(reads) == 1:
            time.sleep(0.4)
            ring.begin(Kind.FORWARD)

    monkeypatch.setattr(RingFile, "read", late)
    seen = watch.look()
    assert len(reads) == 2 and seen.op == "forward" and seen.progress_age_ms < 400.0
    watch.close()


def test_the_state_of_a_control_thread_is_read_while_its_tick_is_late(tmp_path):
    paths = {name: (tmp_path / f"{name}.ring", k) for k, name in enumerate(("main", "control"), 1)}
    RingWriter(paths["main"][0], "main", 0, 0)
    control, over = RingWriter(paths["control"][0], "control", 0, 0), threading.Event()
    waits = threading.Thread(target=over.wait)
    waits.start()
    try:
        control.name_thread(waits.native_id)
        watch = StageWatch(0, 0)
        watch.update(paths)
        control.thread_tick()
        assert watch.look().control_state is None
        time.sleep(0.6)
        assert watch.look().control_state == "S"
        control.name_thread(0)  # As a stage of an older version.
        assert watch.look().control_state is None
        watch.close()
    finally:
        over.set()
        waits.join()


def test_a_thread_that_maps_is_seen_at_it_and_its_dead_predecessor_is_not(tmp_path):
    main, maps = tmp_path / "main.ring", tmp_path / "map.ring"
    RingWriter(main, "main", 0, 0)
    ring = RingWriter(maps, MAP_RING, 0, 0)
    watch = StageWatch(0, 0)
    watch.update({"main": (main, 1), MAP_RING: (maps, 2)})
    assert watch.look().mapping_ms is None
    ring.end(ring.begin(Kind.DEVICE))
    waits = ring.begin(Kind.DEVICE)
    assert watch.look().mapping_ms is None, "it waits for the device"
    ring.end(waits)
    maps_now = ring.begin(Kind.MAP, size=64)
    seen = watch.look()
    assert seen.mapping_ms >= 0.0
    assert [(one.name, one.op) for one in seen.streams] == [("main", None), ("map", "map")]
    assert watch.look().mapping_ms > seen.mapping_ms
    with maps.open("r+b") as file:  # As a process that died at it leaves the ring to its successor.
        file.seek(8 * Word.PID)
        file.write((os.getpid() + 1).to_bytes(8, "little"))
    assert watch.look().mapping_ms is None
    ring.end(maps_now)
    watch.close()


@pytest.mark.parametrize(("theirs", "tokens"), [(3, 3), (4, None), (None, None)])
def test_conflict_has_the_tokens_on_which_both_stages_agree(config, theirs, tokens):
    rings = {}
    for stage, name in itertools.product((0, 1), ("main", "send", "receive")):
        rings[stage, name] = RingWriter(Path(config.ring_dir) / f"s{stage}.0.{name}.ring", name, stage, 0)
    rings[0, "main"].end(rings[0, "main"].begin(Kind.STEP, 8, size=3))
    if theirs is not None:
        rings[1, "main"].begin(Kind.STEP, 8, size=theirs)
    rings[0, "send"].begin(Kind.SEND, 8, 1, 768, 7, 5, done_ns=1)
    rings[1, "receive"].begin(Kind.RECEIVE, 8, 0, 1024, 7, 5)
    sampler = Sampler(config)

    def seen():
        (edge,) = [edge for stage in sampler.look().stages for edge in stage.edges if edge.kind == "send"]
        return edge.conflict[0].size, edge.conflict[1].size, edge.conflict_tokens

    assert seen() == (768, 1024, tokens)
    for ring in (rings[0, "main"], rings[1, "main"]):
        for step in range(9, 9 + 2 * DEFAULT_CAPACITY):
            ring.begin(Kind.STEP, step, size=1)
    assert seen() == (768, 1024, tokens), "the rings have forgotten the step"


def test_what_is_no_ring_is_left_alone(config):
    folder = Path(config.ring_dir)
    for name in ("s0.0.main.ring", "s9.ring", "../x", "notes.txt"):
        with contextlib.suppress(OSError):
            (folder / name.replace("/", "_")).write_bytes(b"half a ring")
    assert Sampler(config).look().stages == []


def test_a_gateway_that_takes_nothing_costs_drops_and_no_time(config):
    with stage_process(config), started("ppengine.agent", config) as (process, _):
        # Nobody listens: the agent goes on, and answers on its other socket.
        assert ask(config, Inspect(nonce=2, what="blocks")).code == "UNSUPPORTED"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(8 * CALM_S)
        with zmq.Context() as context, context.socket(zmq.PULL) as pull:
            pull.linger = 0
            pull.bind(config.endpoint("collect"))
            first(pull, lambda s: s.process_state in ("R", "S"))
            for report in reports(pull):
                if report.dropped:
                    break
            assert report.dropped < 40, "what waits is old; only a few wait"


def ask(config, question):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as desk:
        desk.linger, desk.router_mandatory = 0, 1
        desk.bind(config.endpoint("agent"))
        until(lambda: sent(desk, [config.node_name.encode(), frames.encode(question)]), what="the agent connects")
        assert desk.poll(15_000), "no stacks"
        return frames.Codec(Inspected | Failed).decode(desk.recv_multipart()[1])


def sent(desk, parts):
    try:
        desk.send_multipart(parts)
    except zmq.ZMQError:
        return False
    return True


@pytest.mark.parametrize("stop", [False, True])
def test_stacks_of_a_real_process_running_or_stopped(config, stop):
    with stage_process(config) as process, agent(config) as (_, _, pull):
        first(pull, lambda s: s.pid == process.pid)
        if stop:
            os.kill(process.pid, signal.SIGSTOP)
            first(pull, lambda s: s.process_state == "T")
        answer = ask(config, Inspect(nonce=7, what="stacks"))
        assert isinstance(answer, Inspected) and answer.nonce == 7
        found = frames.decode_as(StacksDetail, bytes(answer.data)).stages
        assert [one.stage for one in found] == [0, 1]
        assert found[0].pid == process.pid and "waiting_in_a_function_of_its_own" in found[0].text, found[0]
        assert found[0].error == ""
        assert found[1].text == "" and "no such process" in found[1].error


def test_questions_that_the_agent_cannot_answer(config):
    with agent(config):
        assert ask(config, Inspect(nonce=1, what="stacks", stage=5)).code == "NOT_FOUND"
        assert ask(config, Inspect(nonce=2, what="blocks")).code == "UNSUPPORTED"


def test_a_question_without_room_for_threads_fails_and_the_next_one_is_answered(config, monkeypatch):
    """An exception would end the thread that answers, and no stack would be had any more."""
    server = object.__new__(StackServer)
    server._config, server._sampler, server.pauses = config, Sampler(config), PtracePauses()
    question, ability = Inspect(nonce=3, what="stacks", stage=0), Ability(False, False, "none")
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", no_thread)
        failed = server._answer(question, ability)
        assert (failed.nonce, failed.code) == (3, "FAILED")
        assert failed.text == "the agent cannot look: can't start new thread"
    assert isinstance(server._answer(question, ability), Inspected)


def no_thread(thread):
    raise RuntimeError("can't start new thread")


def test_without_py_spy_the_process_writes_its_own_stack(config, monkeypatch):
    monkeypatch.setattr(stack_dumps, "_find", lambda: None)
    with stage_process(config) as process:
        found = stack_dumps.take(0, process.pid, Path(config.run_dir, "s0.0.stack"))
        assert "waiting_in_a_function_of_its_own" in found.text
        assert "py-spy is not installed" in found.error and "faulthandler" in found.error
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: procfs.read_stat(process.pid).state == "T")
        assert "takes no signal" in stack_dumps.take(0, process.pid, Path(config.run_dir, "s0.0.stack")).error


def test_who_traces_a_process_is_known(config):
    with stage_process(config) as process:
        watched = Sampler(config)
        (seen,) = watched.look().stages
        assert seen.tracer is None
        name = Path("/proc/self/comm").read_text().strip()
        tracer = Tracer(process.pid)
        try:
            (seen,) = watched.look().stages
            assert (seen.process_state, seen.tracer) == ("t", f"{name} (pid {os.getpid()})")
            assert not is_calm(seen)
        finally:
            tracer.detach()
        (seen,) = watched.look().stages
        assert seen.process_state in "RS" and seen.tracer is None


def test_a_process_without_a_handler_is_not_signalled(monkeypatch, tmp_path):
    monkeypatch.setattr(stack_dumps, "_find", lambda: None)
    process = subprocess.Popen(["sleep", "60"])
    try:
        found = stack_dumps.take(0, process.pid, tmp_path / "s")
        assert found.text == "" and "no handler for SIGUSR2" in found.error
        assert process.poll() is None, "the signal would have killed it"
    finally:
        process.kill()
        process.wait()


def test_the_agent_leaves_with_its_parent_and_on_sigterm(config):
    with agent(config) as (process, line, pull):
        next(reports(pull))
        line.close()
        assert process.wait(20) is not None
    with agent(config) as (process, _, pull):
        next(reports(pull))
        process.terminate()
        assert process.wait(20) == 0


def test_the_agent_needs_no_torch():
    code = "import sys, ppengine.agent.agent, ppengine.gateway.gateway; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_proc_of_what_is_not_there():
    gone = 2**22 + 1
    assert procfs.read_stat(gone) is None and procfs.cgroups(gone) == ""
    assert procfs.resident_ranges(gone, [(0, 1)]) is None
    assert procfs.catches(gone, signal.SIGUSR2) is False


def test_cgroups_of_nested_containers_are_read_to_their_end(monkeypatch):
    """Version 1 has a line a controller, each with the whole path; a name may have bytes that are no UTF-8."""
    path = b"/kubepods.slice/" + b"x" * 400 + b"/\xff"
    lines = b"".join(b"%d:controller%d:%s\n" % (number, number, path) for number in range(14, 0, -1))
    monkeypatch.setattr(procfs, "_content", lambda name, most: lines[:most])
    found = procfs.cgroups(1).splitlines()
    assert len(found) == 14 and all(line.endswith("/\N{REPLACEMENT CHARACTER}") for line in found)


def test_a_process_is_followed_to_another_cgroup_at_once(tmp_path, monkeypatch):
    """What killed it there is known, and what that group counted before is not taken for its own."""
    files = {"a": tmp_path / "a", "b": tmp_path / "b"}
    monkeypatch.setattr(procfs, "oom_kill_files", lambda groups: [files[groups]])
    kills = OomKills()
    kills.follow("")
    assert kills.total is None
    files["a"].write_text("oom_kill 2\n")
    files["b"].write_text("oom_kill 7\n")
    kills.follow("a")
    assert kills.total == 2
    kills.follow("b")
    assert kills.total == 2
    files["b"].write_text("oom_kill 8\n")
    kills.read()
    assert kills.total == 3
    files["b"].unlink()
    kills.read()
    assert kills.total == 3


def test_kills_of_a_cgroup_are_read_from_either_version(tmp_path):
    for name, text in {
        "memory.events": "low 0\nhigh 3\nmax 9\noom 2\noom_kill 1\noom_group_kill 7\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
        "old.oom_control": "oom_kill_disable 0\nunder_oom 0\n",
    }.items():
        (tmp_path / name).write_text(text)
    files = [tmp_path / name for name in ("memory.events", "memory.oom_control", "old.oom_control", "none")]
    assert procfs.oom_kills(files[:1]) == 1
    assert procfs.oom_kills(files[:2]) == procfs.oom_kills(files) == 4
    assert procfs.oom_kills(files[2:]) is None


@pytest.mark.parametrize(
    ("changes", "calm"),
    [
        ({}, True), ({"process_state": "D"}, True), ({"process_state": "T"}, False), ({"process_state": None}, False),
        ({"process_state": "Z"}, False), ({"progress_age_ms": 399.0}, True), ({"progress_age_ms": 400.0}, False),
        ({"tick_age_ms": 400.0}, False), ({"progress_age_ms": 9000.0, "phase": "load"}, True),
        ({"progress_age_ms": 9000.0, "phase": "load", "process_state": "T"}, False),
    ],
)  # fmt: skip
def test_what_does_not_move_is_looked_at_more_often(changes, calm):
    moving = {"process_state": "S", "progress_age_ms": 10.0, "tick_age_ms": 10.0, "phase": "serving"}
    assert is_calm(sample(0, **{**moving, **changes})) is calm
