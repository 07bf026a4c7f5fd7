"""A test that plays the core: starts real stage processes and speaks the steps protocol with them."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq
from forks import fork
from ppengine.checkpoint.model_spec import read_spec
from ppengine.common.child_process import Child
from ppengine.common.config import EngineConfig, build_profile
from ppengine.common.partition import partition_layers
from ppengine.common.ring import RingReader, Word
from ppengine.protocol.check_messages import StageFindings
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.stage_lifecycle import Drained, NewGeneration, Shutdown, StageFailed, StageProgress, StageReady
from ppengine.protocol.steps import (
    TOKEN_REGISTERED,
    FromStage,
    LateMasks,
    Mapped,
    Move,
    Register,
    Retired,
    Row,
    Sampled,
    Step,
)

BLOCK = 8
THREADS = 1


class FakeCore:
    """Context manager around `stages` stage processes on the checkpoint in `folder`."""

    def __init__(
        self,
        folder: Path,
        stages: int = 2,
        start: bool = True,
        modules: dict[int, str] | None = None,
        **sections: dict[str, Any],
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="stage-test-"))
        run, rings = self.folder / "run", self.folder / "rings"
        run.mkdir(mode=0o700)
        data: dict[str, Any] = {
            "name": "test",
            "model": {"path": str(folder), "dtype": "float64", **sections.get("model", {})},
            "parallel": {"pipeline": stages},
            "memory": {"device_mib": 64, "swap_space_gib": 0.001, "block_size": BLOCK, **sections.get("memory", {})},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64, **sections.get("scheduler", {})},
            "threads_per_stage": THREADS,
        }
        profile = build_profile(data, base=self.folder)
        self.config = EngineConfig(
            id="test", name="test", epoch=uuid.uuid4().hex, profile=profile, model_path=str(folder), model_type="",
            layers=partition_layers(read_spec(folder).num_layers, stages), max_model_len=256,
            run_dir=str(run), ring_dir=str(rings), started_wall=time.time(),
        )  # fmt: skip
        (run / "engine.json").write_bytes(msgspec.json.encode(self.config))
        self.stages = stages
        self.modules = modules or {}
        self.children: dict[int, Child] = {}
        self.ready: dict[int, StageReady] = {}
        self.progress: list[StageProgress] = []
        self.failed: list[StageFailed] = []
        self.fatal: list[Retired] = []
        self.findings: list[StageFindings] = []
        self.retired: dict[int, dict[int, Retired]] = {}
        self.mapped: dict[int, dict[int, Mapped]] = {}
        self.number = 0
        self.generation = 1
        self.drained: list[Drained] = []
        self.slots: set[int] = set()
        self._codec = Codec(FromStage)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(self.config.endpoint("steps"))
        if start:
            for stage in range(stages):
                self.start(stage)

    def __enter__(self) -> FakeCore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for stage in self.children:
                print(f"--- log of stage {stage}:\n{self.log(stage)}")
        for child in self.children.values():
            child.kill()
            child.wait(60)
            child.close()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self.folder)

    def start(self, stage: int, generation: int = 1) -> None:
        args = ["--engine", f"{self.config.run_dir}/engine.json", "--stage", str(stage), "--rank", "0"]
        args += ["--generation", str(generation)]
        module = self.modules.get(stage, "ppengine.stage.worker")
        self.children[stage] = fork(module, args, self.folder / f"stage{stage}.log")

    def log(self, stage: int) -> str:
        return (self.folder / f"stage{stage}.log").read_text()

    def complaints(self, stage: int) -> list[str]:
        """Return the lines of a stage's log that are no news."""
        return [line for line in self.log(stage).splitlines() if " INFO " not in line]

    def pump(self, timeout: float = 0.05) -> None:
        """Take what has come; waits for at most `timeout` seconds for the first message."""
        while self._socket.poll(int(timeout * 1000)):
            timeout = 0
            _, body = self._socket.recv_multipart()
            message = self._codec.decode(body)
            if isinstance(message, StageReady):
                self.ready[message.stage] = message
            elif isinstance(message, Retired) and message.fatal:
                self.fatal.append(message)
            elif isinstance(message, Retired):
                self.retired.setdefault(message.number, {})[message.stage] = message
            elif isinstance(message, Mapped):
                self.mapped.setdefault(message.number, {})[message.stage] = message
            elif isinstance(message, Drained):
                self.drained.append(message)
            elif isinstance(message, StageProgress):
                self.progress.append(message)
            elif isinstance(message, StageFailed):
                self.failed.append(message)
            elif isinstance(message, StageFindings):
                self.findings.append(message)

    def until(self, condition: Any, what: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s; fatal: {self.fatal}, {self.failed}"
            self.pump()

    def serve(self, blocks: int = 64) -> None:
        """Wait until all stages are ready and map `blocks`."""
        self.until(lambda: len(self.ready) == self.stages, "all stages ready")
        assert {mapped.blocks for mapped in self.map(blocks).values()} == {blocks}

    def send(self, **fields: Any) -> int:
        """Send the next step to every stage and return its number."""
        self.number += 1
        self.slots |= {register.slot for register in fields.get("register", [])}
        self.broadcast(Step(self.generation, self.number, 0, **fields))
        return self.number

    def broadcast(self, step: Step) -> None:
        """Send `step` to every stage."""
        for stage in self.children:
            self._socket.send_multipart([f"s{stage}.0".encode(), encode(step)])

    def masks(self, message: LateMasks) -> None:
        """Send masks that come behind their step, or before it, to the last stage."""
        self._socket.send_multipart([f"s{self.stages - 1}.0".encode(), encode(message)])

    def restart(self, stage: int) -> None:
        """Begin a generation as the core does it after the loss of `stage`, and wait until all have met."""
        self.generation += 1
        child = self.children.pop(stage)
        child.kill()
        child.wait(60)
        child.close()
        self.ready.clear()
        self.slots.clear()
        self.tell_all()
        self.start(stage, self.generation)
        self.until(
            lambda: {ready.generation for ready in self.ready.values()} == {self.generation}
            and len(self.ready) == self.stages, "all have met again",
        )  # fmt: skip
        # Echoes of the loss, in the generation that is over.
        assert all(fatal.generation < self.generation for fatal in self.fatal)
        self.fatal.clear()

    def tell_all(self) -> None:
        """Tell every stage of the present generation."""
        for stage in self.children:
            for prefix in ("s", "c"):
                self._socket.send_multipart([f"{prefix}{stage}.0".encode(), encode(NewGeneration(self.generation, 1))])

    def release(self) -> None:
        """Release all requests."""
        slots, self.slots = sorted(self.slots), set()
        self.run(release=slots)

    def result(self, number: int) -> list[Sampled]:
        """Wait until all stages have retired step `number` and return what was sampled."""
        self.until(lambda: len(self.retired.get(number, {})) == self.stages or self.fatal, f"step {number} retired")
        assert not self.fatal, self.fatal
        return self.retired[number][self.stages - 1].sampled

    def run(self, **fields: Any) -> list[Sampled]:
        """Send one step and wait for it."""
        return self.result(self.send(**fields))

    def map(self, blocks: int, **fields: Any) -> dict[int, Mapped]:
        """Send one step that changes the mapping, and wait until all stages have done so; return what came of it."""
        number = self.send(map_blocks=blocks, **fields)
        self.result(number)
        self.until(lambda: len(self.mapped.get(number, {})) == self.stages, f"what step {number} began has ended")
        return self.mapped[number]

    def await_tick(self, ring: RingReader, when: str) -> None:
        """Wait for a tick of the control thread, which writes it into `ring`, too."""
        tick = ring.word(Word.THREAD_TICK_NS)
        self.until(lambda: ring.word(Word.THREAD_TICK_NS) > tick, f"the control thread's tick {when}", 2)

    def shutdown(self, stage: int, control: bool = False) -> None:
        identity = f"{'c' if control else 's'}{stage}.0".encode()
        self._socket.send_multipart([identity, encode(Shutdown(1))])


class Sequence:
    """One greedy request with blocks that the test chooses."""

    _names = itertools.count()

    def __init__(self, core: FakeCore, slot: int, prompt: list[int], blocks: list[int], **sampling: Any) -> None:
        self.core, self.slot, self.prompt, self.blocks = core, slot, prompt, blocks
        self.tokens = list(prompt)
        fields: dict[str, Any] = {
            "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 1, "sample": 0, "min_tokens": 0,
            "stop_token_ids": [], "logprobs": -1, **sampling,
        }  # fmt: skip
        name = f"r{next(self._names)}"
        self.register = Register(slot=slot, request=name, tokens=list(prompt), prompt_len=len(prompt), **fields)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def prefill(self, chunk: int) -> None:
        """Compute the prompt in chunks and take the first output token."""
        self.core.run(register=[self.register], tables=[(self.slot, 0, self.blocks)])
        starts = range(0, len(self.prompt), chunk)
        for start in starts:
            count = min(chunk, len(self.prompt) - start)
            last = start + count == len(self.prompt)
            sampled = self.core.run(rows=[Row(self.slot, start, count, last, TOKEN_REGISTERED)])
            assert len(sampled) == last
            self.take(sampled)

    def row(self, token: int | None = None, ahead: int = 0) -> Row:
        """The next decode row; `ahead` counts tokens that are sampled but unknown."""
        return Row(self.slot, len(self.tokens) - 1 + ahead, 1, True, self.tokens[-1] if token is None else token)

    def take(self, sampled: list[Sampled]) -> None:
        self.tokens += [entry.token for entry in sampled if entry.slot == self.slot]

    def decode(self, count: int) -> None:
        for _ in range(count):
            self.take(self.core.run(rows=[self.row()]))

    def move(self, moves: list[tuple[int, int, int]], blocks: list[int]) -> dict[str, Any]:
        """Step fields that copy blocks and point the table at the new ones."""
        self.blocks = blocks
        return {"moves": [Move(*move) for move in moves], "tables": [(self.slot, 0, blocks)]}
