"""A core with the real grammar process on the bundled tokenizer, and stages that choose among allowed tokens."""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec
import numpy as np
import zmq
from core_world import CoreWorld
from ppengine.checkpoint.model_spec import read_spec
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.protocol.frames import Codec
from ppengine.protocol.grammar_messages import FromGrammars
from ppengine.protocol.offline import AddMany
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.structured_outputs import StructuredOutputsParams
from ppengine.protocol.token_mask import TokenMask
from ppengine.protocol.verbs import Submit

MODEL = Path(__file__).parents[2] / "profiles" / "models" / "tiny"
TOKENIZER = Tokenizer.load(MODEL)
EOS = 0


def allowed(mask: TokenMask) -> list[int]:
    """Return the tokens of a mask, in order."""
    words = np.frombuffer(mask.words, "<u4").tolist()
    places = np.frombuffer(mask.places, "<i4").tolist() if mask.places else range(len(words))
    return [32 * place + bit for place, word in zip(places, words, strict=True) for bit in range(32) if word >> bit & 1]


def constrained(**fields) -> SamplingParams:
    """Return sampling of an output that has the form of the first argument, a field of `StructuredOutputsParams`."""
    forms = {name: fields.pop(name) for name in list(fields) if name in StructuredOutputsParams.__struct_fields__}
    return SamplingParams(**{"max_tokens": 40, **fields}, structured_outputs=StructuredOutputsParams(**forms))


class GrammarWorld(CoreWorld):
    """One core on the clock of the machine, with the socket `grammar`. Close it.

    The stages choose a token by the place alone: of the allowed ones if there is a mask.
    """

    def __init__(self, folder: Path, **options):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._codec_of_grammars = Codec(FromGrammars)
        self.most_sampling: dict[str, int] = {}
        """Most unretired steps that sample, by request."""
        self.gathered = self.early = 0
        """Messages of masks that called for no turn."""
        self.sampled = 0
        """Tokens that the stages have chosen."""
        super().__init__(
            has_tokenizer=True,
            run_dir=str(folder),
            model=str(MODEL),
            eos=EOS,
            vocabulary=read_spec(MODEL).vocab_size,
            serve=False,
            schedule_ahead=True,
            **options,
        )
        path = Path(self.config.endpoint("grammar").removeprefix("ipc://"))
        path.unlink(missing_ok=True)
        self._socket.bind(self.config.endpoint("grammar"))
        (folder / "engine.json").write_bytes(msgspec.json.encode(self.config))
        self.now = time.monotonic()
        if options.get("before") is None:
            self.ready()
            self.run()

    def send_grammar(self, name, payload):
        self._socket.send_multipart([name, payload], zmq.NOBLOCK)

    def close(self):
        self.engine.constraints.close()
        self._socket.close(0)
        self._context.term()

    @property
    def process(self):
        """The child that computes masks; None if there is none."""
        return self.engine.constraints.masks.processes[0].child.process

    def add(self, *samplings, nonce=1, names=None):
        """Send one prompt for each of `samplings`, in one message."""
        names = names or [f"r{index}" for index in range(len(samplings))]
        submissions = [
            Submit(prompt_token_ids=[5, 6, 7], sampling=sampling, request=name)
            for name, sampling in zip(names, samplings, strict=True)
        ]
        self.engine.offline.add_many(b"x", AddMany(nonce=nonce, session="s", submissions=submissions))

    def added(self, nonce=1):
        """Return the answer to a message; None before it is there."""
        return next((answer for _, answer in self.answers if getattr(answer, "nonce", 0) == nonce), None)

    def turn(self, *, retires=True):
        """Take one turn: messages of the process, advance, retire the oldest step."""
        if self._socket.poll(0 if self.steps else 10):
            name, payload = self._socket.recv_multipart()
            before = len(self.late_masks)
            calls = self.engine.on_grammars(name, self._codec_of_grammars.decode(payload))
            self.early += len(self.late_masks) - before
            self.now = max(self.now, time.monotonic())
            if not calls and self.now < (self.engine.constraints.next_deadline or 0):
                self.gathered += 1
                return  # Masks wait for those of other processes, as in the core's loop.
        self.now = max(self.now, time.monotonic())
        self.engine.advance()
        for request in self.scheduler.queues.requests.values():
            self.most_sampling[request.id] = max(self.most_sampling.get(request.id, 0), request.pending)
        if retires and self.steps and not self.waits:
            self.retire()

    @property
    def waits(self):
        """Whether the oldest step waits for its masks."""
        return bool(self.steps[0].late) and self.steps[0].number not in self.late_masks

    def until(self, condition, what, timeout=60.0, **turns):
        """Take turns until `condition` holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
            self.turn(**turns)

    def ended(self, *names):
        """Take turns to the end of requests; return the text of each, without a stop token."""
        self.until(lambda: all(self.reason(name) for name in names), f"{names} end")
        return [self.text(name) for name in names]

    def reason(self, name):
        """Return why a request has ended; None while it has not."""
        output = self.engine.outputs.get(name)
        return None if output is None else output.samples[0].finish_reason

    def text(self, name):
        """Return the text of a request without a stop token."""
        return TOKENIZER.decode([token for token in self.tokens(name) if token != EOS])

    def _token(self, step, row):
        self.sampled += 1
        late = self.late_masks[step.number].masks if step.late else []
        masks = {slot: mask.tokens for mask in [*step.masks, *late] for slot in mask.slots}
        draw = random.Random(row.start + row.count)
        if row.slot not in masks:
            return draw.randrange(5, 2000)
        return draw.choice(allowed(masks[row.slot]))
