"""An engine core without sockets: its messages go into lists, and stages that the test answers for."""

from __future__ import annotations

from collections import deque

import msgspec
import scheduler_invariants
from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import MemoryConfig, ModelConfig, ParallelConfig, SchedulerConfig, SloConfig
from ppengine.common.tier_config import TierConfig
from ppengine.core.engine import Engine
from ppengine.core.journal_records import DECODER, ENCODER
from ppengine.core.journal_state import Restored
from ppengine.protocol.control import Command
from ppengine.protocol.facts import Fact
from ppengine.protocol.frames import Codec
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.stage_lifecycle import Drained, StageReady
from ppengine.protocol.steps import LateMasks, Mapped, Retired, Sampled, Step, ToStage
from ppengine.protocol.verbs import SetMemory, Submit

VOCAB = 100
NO_SLO = SloConfig()
NO_TIERS = TierConfig()
PEAK, BLOCK = 1000, 10
"""Bytes of a stage: utilization u holds 1000 * u - 100 blocks."""


class MemoryJournal:
    """A journal without a file."""

    def __init__(self):
        self._written, self._turn = [], []
        self.lost: set[int] = set()
        """Turns that another core cannot read."""

    def note(self, record):
        self._turn.append(record)

    def begin(self, state):
        self.state = state
        self._written = [ENCODER.encode(list(state()))]

    def commit(self, state, now):
        self._written.append(ENCODER.encode(self._turn))
        self._turn = []

    def take_failure(self):
        return ""

    @property
    def records(self):
        """Everything since the last full state."""
        return [record for turn in self._written for record in DECODER.decode(turn)]

    def restored(self):
        """Return the state that another core finds."""
        restored = Restored()

        def read():
            for number, turn in enumerate(self._written):
                if number in self.lost:
                    restored.damage.append(f"turn {number} is left out")
                else:
                    yield from DECODER.decode(turn)

        restored.apply(read())
        return restored

    @property
    def turns(self):
        """Number of turns, the full state at the beginning among them."""
        return len(self._written)


class CoreWorld:
    """One engine core. `answers` holds (client, message), `steps` what the stages have not retired.

    With `before`, a world whose core was killed, it follows that one.
    """

    def __init__(self, *, stages=2, tensor=1, has_tokenizer=False, utilization=0.5, max_model_len=64, serve=True,
        restart="auto", restart_limit_s=60.0, load_format="auto", cards=None, eos=2, vocabulary=VOCAB,
        run_dir="/r", model="m", journal=True, before=None, slo=NO_SLO, tiers=NO_TIERS, slot_bytes=0, **scheduler,
    ):  # fmt: skip
        self.cards: dict[int, str] = cards or {}
        self.slot_bytes = slot_bytes
        """Bytes of a host slot that a store may map; 0: slots are private."""
        profile = Profile(
            name="t", model=ModelConfig(path=model, load_format=load_format, skip_tokenizer=not has_tokenizer),
            parallel=ParallelConfig(pipeline=stages, tensor=tensor, restart=restart, restart_limit_s=restart_limit_s),
            memory=MemoryConfig(utilization=utilization, block_size=8),
            scheduler=SchedulerConfig(**scheduler), journal=journal, slo=slo, tiers=tiers,
        )  # fmt: skip
        self.config = config = EngineConfig(
            id="e", name="t", epoch="epoch", profile=profile, model_path=model, model_type="opt",
            layers=[(index, index + 1) for index in range(stages)], max_model_len=max_model_len, run_dir=run_dir,
            ring_dir="/d", started_wall=0.0,
        )  # fmt: skip
        spec = ModelSpec(
            model_type="opt", architecture="OPTForCausalLM", num_layers=stages, hidden_size=8, num_heads=1,
            num_kv_heads=1, head_dim=8, intermediate_size=8, vocab_size=vocabulary, max_position=max_model_len,
            dtype="float32", tie_word_embeddings=True, norm_eps=1e-5, activation="relu", eos_token_ids=[eos],
        )  # fmt: skip
        self.answers: list[tuple[bytes, msgspec.Struct]] = []
        self.events = []
        self.facts: list[Fact] = []
        self.steps: deque[Step] = deque()
        self.late_masks: dict[int, LateMasks] = {}
        self.changing: Step | None = None
        """The newest map step that the stages have retired."""
        self.started: list[tuple[int, int]] = []
        """(stage, generation): what the supervisor was asked to start."""
        self.places_started = []
        self.told_to_leave: list[tuple[int, int]] = []
        self.meant: list[int] = []
        """The generation that the process of each of these notices was started for."""
        self.next_token = 5
        self.shadow_tasks: list[bytes] = []
        self.journal = MemoryJournal()
        self.counting = False
        """Let the n-th output of a request be the token n, so that a token lost or given twice shows."""
        self.now = 1000.0
        self._codec = Codec(ToStage)
        self._count = 0
        self.engine = Engine(
            config, spec, send_step=self._take_step,
            reply=lambda client, message: self.answers.append((client, message)), happened=self.events.append,
            send_shadow=self.shadow_tasks.append,
            send_grammar=lambda name, payload: self.send_grammar(name, payload),
            send_store=lambda place, message: self.send_store(place, message),
            start_stage=self._start,
            notify_stage=self._notify,
            note=self.facts.append, store=self.journal,
            restored=before.journal.restored() if before is not None else None, clock=lambda: self.now,
        )  # fmt: skip
        if serve:
            self.ready()
            self.run()

    def _notify(self, place, message):
        self.told_to_leave.append((place.stage, message.generation))
        self.meant.append(message.started)

    def _start(self, place, generation):
        self.started.append((place.stage, generation))
        self.places_started.append((place, generation))

    def send_grammar(self, name, payload):
        """Send questions to the grammar process; `GrammarWorld` has one."""
        raise AssertionError(f"no grammar process here, for {name}")

    def send_store(self, place, message):
        """Send a message to a store; `TierWorld` has some."""
        raise AssertionError(f"no store here, for {place}")

    def _take_step(self, others, last):
        """Take a step as the last stage gets it, or masks behind one; the others get steps without masks."""
        step = self._codec.decode(last)
        if isinstance(step, LateMasks):
            assert not others and step.generation == self.generation
            self.late_masks[step.number] = step
            return
        assert self._codec.decode(others) == msgspec.structs.replace(step, masks=[])
        self.steps.append(step)

    @property
    def scheduler(self):
        """The scheduler of a core that serves."""
        return self.engine.health.require().scheduler

    @property
    def memory(self):
        """The memory controller of a core that serves."""
        return self.engine.health.require().memory

    @property
    def generation(self):
        """The generation that steps are for."""
        return self.engine.recovery.generation

    def ready(self, swap_blocks=50, stages=None, reserved=900, peak=PEAK):
        """Let all stages (or some) be ready in the present generation, on the cards that `cards` names by stage."""
        for stage, rank in self.engine.stages.places:
            if stages is not None and stage not in stages:
                continue
            self.engine.stage_messages.take(
                StageReady(
                    stage=stage, rank=rank, generation=self.generation, pid=1 + 10 * rank, host="h",
                    layers=[stage, stage + 1],
                    device_kind="cpu", device_name="", device_uuid=self.cards.get(stage),
                    total_bytes=10_000, weights_bytes=PEAK,
                    peak_bytes=peak, block_bytes=BLOCK, quantum_blocks=1, reserved_blocks=reserved,
                    swap_blocks=swap_blocks, slots_fd=3 if self.slot_bytes else -1, slot_bytes=self.slot_bytes,
                    slot_layout="t" if self.slot_bytes else "",
                )
            )  # fmt: skip

    def retire(self, mapped=None, *, answer=True):
        """Retire the oldest step on all stages. `mapped`: what each stage answers to a map step instead of success.

        Not `answer`: they are at what it asks for until `answer` is called.
        """
        step = self.steps.popleft()
        sampled = [Sampled(row.slot, self._token(step, row)) for row in step.rows if row.sample]
        for stage, rank in self.engine.stages.places:
            self.engine.stage_messages.take(Retired(step.generation, step.number, stage, rank, sampled=sampled))
        if step.map_blocks is not None:
            self.changing = step
        if self.changing is step and answer:
            self.answer(mapped)
        else:
            self.engine.advance()
        return step

    def answer(self, mapped=None, stages=None):
        """Let stages (or some) end what the newest map step began; return whether the core then has all answers."""
        step, over = self.changing, False
        for stage, rank in self.engine.stages.places:
            if stages is None or stage in stages:
                blocks = step.map_blocks if mapped is None else mapped[stage]
                error = "" if blocks == step.map_blocks else "no memory"
                over = self.engine.stage_messages.take(Mapped(step.generation, step.number, stage, rank, blocks, error))
        self.engine.advance()
        return over

    def _token(self, step, row):
        if not self.counting:
            return self.next_token
        record = next(r for r in self.scheduler.steps.unretired if r.number == step.number)
        request = next(request for request, _, _ in record.rows if request.slot == row.slot)
        return row.start + row.count - request.num_prompt

    def drained(self, *stages):
        """Let stages have left the older generations."""
        for stage, rank in self.engine.stages.places:
            if stage in stages:
                self.engine.stage_messages.take(Drained(self.generation, stage, rank))

    def tokens(self, name):
        """Return what readers of a request have got so far."""
        return self.engine.outputs.get(name).samples[0].tokens.tolist()

    def run(self, steps=10_000):
        """Take turns until no step is in flight and no stage is at its mapping."""
        self.engine.advance()
        if self.changing is not None:
            self.answer()
        while self.steps and steps:
            self.retire()
            steps -= 1

    def submit(self, prompt=(1, 2, 3), name=None, **sampling):
        """Submit token ids and return the answers."""
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        return self.say(Submit(prompt_token_ids=list(prompt), sampling=params, request=name))

    def say(self, verb, *, client=b"c", **fields):
        """Send a command and return what was answered to it so far."""
        self._count += 1
        name = f"c{self._count}"
        self.engine.commands.handle(client, Command(id=name, epoch="epoch", verb=verb, by="eve", **fields))
        return self.answers_to(name)

    def answers_to(self, name):
        """Return the answers to the command `name`."""
        return [message for _, message in self.answers if getattr(message, "id", "") == name]

    def set_memory(self, utilization):
        """Ask for `utilization`; return the command's id, for `answers_to`."""
        self.say(SetMemory(utilization=utilization))
        return f"c{self._count}"

    def last(self, name):
        """Return the newest answer to the command `name`."""
        return self.answers_to(name)[-1]

    def check(self):
        """Raise AssertionError on a broken invariant, or where what is mapped and what is given out differ."""
        scheduler = self.scheduler
        scheduler_invariants.check(scheduler)
        if not self.memory.busy:
            assert scheduler.blocks.device.size == scheduler.blocks.device.limit == self.memory.mapped_blocks
