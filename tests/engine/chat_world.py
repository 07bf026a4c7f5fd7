"""A core with the real process of chat templates, and a checkpoint whose template the test writes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import zmq
from core_world import VOCAB, CoreWorld
from ppengine.protocol.chat_messages import FromRenderer
from ppengine.protocol.control import Outcome, Refused
from ppengine.protocol.frames import Codec
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit


class Letters:
    """A tokenizer for which every letter is a token. A chat begins with none of its own."""

    longest_token = 1

    def encode(self, text):
        return [1, *self.encode_chat(text)]

    def encode_chat(self, text):
        return [ord(letter) % VOCAB for letter in text]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def stream(self, prompt_ids):
        return self

    def push(self, token):
        return "x"

    def flush(self):
        return ""


class ChatWorld(CoreWorld):
    """One core on the clock of the machine, with the socket `render`. Close it."""

    def __init__(self, folder: Path, template: str | bytes | None, **options):
        if template is not None:
            data = template if isinstance(template, bytes) else template.encode()
            (folder / "chat_template.jinja").write_bytes(data)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._codec_of_renderer = Codec(FromRenderer)
        super().__init__(tokenizer=Letters(), run_dir=str(folder), model=str(folder), max_num_seqs=512, **options)
        self._socket.bind(self.config.endpoint("render"))
        (folder / "engine.json").write_bytes(msgspec.json.encode(self.config))
        self.processes: set[int] = set()
        """Every process of chat templates that this world has seen."""

    def send_renderer(self, name, payload):
        self._socket.send_multipart([name, payload], zmq.NOBLOCK)

    def close(self):
        self.engine.templates.close()
        self._socket.close(0)
        self._context.term()

    def chat(self, text, **fields):
        """Submit a chat and return the command's id."""
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2)
        self.now = time.monotonic()
        self.say(Submit(prompt=text, chat=True, sampling=sampling), **fields)
        return f"c{self._count}"

    def turn(self):
        """Take one turn: messages of the process, advance, retire all steps."""
        if self._socket.poll(10):
            name, payload = self._socket.recv_multipart()
            self.engine.templates.take(name, self._codec_of_renderer.decode(payload))
        self.now = time.monotonic()
        self.processes.update(renderers())
        self.run()

    def until(self, condition, what, timeout=60.0):
        """Take turns until `condition` holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}; {self.said()}"
            self.turn()

    def end_of(self, name, timeout=60.0):
        """Return the end of a chat."""
        self.until(lambda: self.over(name), f"{name} ends", timeout)
        return self.last(name)

    def over(self, name):
        """Return whether a command has its one end."""
        ends = [answer for answer in self.answers_to(name) if isinstance(answer, Outcome | Refused)]
        assert len(ends) <= 1, ends
        return bool(ends)

    def said(self):
        """Return what the process has written."""
        log = Path(self.config.run_dir) / "templates.log"
        return log.read_text() if log.exists() else "no log"


def renderers() -> list[int]:
    """Return the pids of the processes of chat templates that this process has started and that run."""
    found = []
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"ppengine.templates" in words:
            found.append(int(child))
    return found
