"""Faults put into a real process from outside: a folder on its PYTHONPATH whose `sitecustomize` obeys SIGUSR1.

The handler runs in the main thread, between two bytecodes of its loop, wherever that is. The word in the file
`<folder>/<pid>` says what to do. Nothing of the engine knows of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from engines import wait_until

SITE = """
import ctypes, os, re, signal, sys, time
from pathlib import Path

FOLDER = Path(__file__).parent
released = False
holding = 0
planted = []


class Released(Exception):
    pass


def let_go(seconds):
    global released
    released = True
    if holding:
        raise Released


def pause_in_python(seconds):
    time.sleep(seconds)


def spin(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def keep_the_gil(seconds):
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))


def raise_an_error(seconds):
    raise ValueError("the weights of layer 3 are gone")


def run_out_of_memory(seconds):
    raise MemoryError("cannot allocate 17 GiB")


def eat_memory(seconds):
    held = bytearray(512 << 20)
    time.sleep(seconds)
    return held


def abort(seconds):
    os.abort()


def skip_a_send(seconds):
    from ppengine.stage.transport import WireSender
    put = WireSender.put

    def skip(self, step, tensor):
        WireSender.put = put
    WireSender.put = skip


def send_less(seconds):
    from ppengine.stage.transport import WireSender
    put = WireSender.put

    def shorter(self, step, tensor):
        WireSender.put = put
        put(self, step, tensor[..., : tensor.shape[-1] // 2].contiguous())
    WireSender.put = shorter


def lose_on_the_wire(seconds):
    from ppengine.stage.wire import Wire
    Wire.push = lambda self, parts: []


def forget_to_receive(seconds):
    from ppengine.stage.transport import WireReceiver
    take = WireReceiver.take

    def later(self, step):
        WireReceiver.take = take
        until = time.monotonic() + seconds
        while time.monotonic() < until and not released:
            time.sleep(0.05)
        return take(self, step)
    WireReceiver.take = later


def lose_a_step(seconds):
    from ppengine.stage.step_loop import StepLoop
    take = StepLoop._take

    def losing(self, timeout_ms):
        before = len(self._inbox)
        take(self, timeout_ms)
        if len(self._inbox) > before:
            self._inbox.clear()
    StepLoop._take = losing


def lose_an_answer(seconds):
    from ppengine.protocol.steps import Retired
    from ppengine.stage.core_link import CoreLink
    send = CoreLink.send

    def losing(self, message):
        CoreLink.send = send
        if not isinstance(message, Retired):
            send(self, message)
    CoreLink.send = losing


def slow_down(seconds):
    from ppengine.models.stage_model import StageModel
    run = StageModel.run

    def slower(self, *args):
        begun = time.monotonic()
        found = run(self, *args)
        time.sleep(2 * (time.monotonic() - begun))
        return found
    StageModel.run = slower


pace = 0.0


def take_time(seconds):
    global pace
    from ppengine.models.stage_model import StageModel
    run, pace = StageModel.run, seconds

    def paced(self, *args):
        time.sleep(pace)
        return run(self, *args)
    if run.__name__ != "paced":
        StageModel.run = paced


def map_beside(seconds):
    from ppengine.common.config import EngineConfig
    from ppengine.common.ring import MAP_RING, Kind
    from ppengine.stage.backends.cpu.kv_cache import CpuKvCache
    from ppengine.stage.recorder import open_recorder

    def argument(name):
        return sys.argv[sys.argv.index(name) + 1]

    ring = open_recorder(EngineConfig.load(Path(argument("--engine"))), int(argument("--stage")), 0, MAP_RING, 1)
    until = 0.0

    def prepare(self, count):
        nonlocal until
        until = time.monotonic() + seconds
        ring.begin(Kind.MAP, size=count)

    def prepared(self, count):
        if not released and time.monotonic() < until:
            return False
        ring.end(ring._head)
        return True
    CpuKvCache.prepare, CpuKvCache.prepared = prepare, prepared


def stale_block(seconds):
    runner = sys.modules["ppengine.stage.backends.cpu.cpu_runner"]
    copy = runner.copy_layers
    runner.copy_layers = lambda source, target, pairs: copy(source, target, pairs[:-1])
    planted.append(lambda: setattr(runner, "copy_layers", copy))


def slot_off_by_one(seconds):
    from ppengine.stage.batch_state import BatchState
    plan = BatchState.plan

    def shifted(self, rows):
        found = plan(self, rows)
        found.batch.slot_mapping[-1] ^= 1  # The one beside it, in the same block.
        return found
    BatchState.plan = shifted
    planted.append(lambda: setattr(BatchState, "plan", plan))


def find_zap_handler(seconds):
    import threading
    found = next(thread for thread in threading.enumerate() if thread.name == "zap")
    (FOLDER / f"{os.getpid()}.thread").write_text(str(found.native_id))


def end_zap_handlers(seconds):
    from ppengine.common.zap import ZapHandler
    answer = ZapHandler._answer

    def end(self, request):
        raise SystemExit  # It ends this thread alone, without a word.
    ZapHandler._answer = end
    planted.append(lambda: setattr(ZapHandler, "_answer", answer))


def uproot(seconds):
    while planted:
        planted.pop()()


def obey(number, frame):
    global released, holding
    word, seconds = (FOLDER / str(os.getpid())).read_text().split()
    if word == "let_go":
        let_go(0)
        return
    released = False
    holding += 1
    try:
        globals()[word](float(seconds))
    except Released:
        pass
    finally:
        holding -= 1
        (FOLDER / f"{os.getpid()}.done").touch()


signal.signal(signal.SIGUSR1, obey)
"""


class Injector:
    """Makes the folder and tells a stage what to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(SITE)

    @property
    def path(self) -> str:
        """PYTHONPATH for the engine."""
        return os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])

    def tell(self, pid: int, word: str, seconds: float = 6.0) -> None:
        """Let process `pid` do `word` (a function of `SITE`)."""
        (self.folder / str(pid)).write_text(f"{word} {seconds}")
        os.kill(pid, signal.SIGUSR1)

    def plant(self, pid: int, word: str, seconds: float = 6.0) -> None:
        """Let process `pid` do `word`, which takes no time, and wait until that is done; `uproot` undoes it."""
        done = self.folder / f"{pid}.done"
        done.unlink(missing_ok=True)
        self.tell(pid, word, seconds)
        wait_until(done.exists, f"{pid} has done {word}")

    @contextlib.contextmanager
    def paced(self, pid: int, seconds: float) -> Iterator[None]:
        """Let each step of stage `pid` take that much longer meanwhile."""
        self.plant(pid, "take_time", seconds)
        try:
            yield
        finally:
            self.plant(pid, "take_time", 0.0)

    def release(self, pid: int) -> None:
        """Let process `pid` go on with its work, if it is held up."""
        self.tell(pid, "let_go", 0.0)
