"""The encoder of texts with its real child, and a checkpoint whose template the test writes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import zmq
from core_world import VOCAB
from ppengine.checkpoint.tokenizer import TextError
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import ModelConfig
from ppengine.common.template_process import TemplateProcess
from ppengine.protocol.chat_messages import FromRenderer
from ppengine.protocol.frames import Codec
from ppengine.protocol.text_messages import Encode, Encoded
from ppengine.protocol.verbs import Submit
from ppengine.texts.submission_encoder import SubmissionEncoder

MAX_MODEL_LEN = 64


class Letters:
    """A tokenizer for which every letter is a token, and a tilde fails. A chat begins with none of its own."""

    longest_token = 1

    def encode(self, text):
        return [1, *self.encode_chat(text)]

    def encode_chat(self, text):
        if "~" in text:
            raise TextError("a tilde has no token")
        return [ord(letter) % VOCAB for letter in text]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def stream(self, prompt_ids):
        return self

    def push(self, token):
        return "x"

    def flush(self):
        return ""


class ChatWorld:
    """One encoder with the socket `render`; `answers` has what the gateway would get. Close it."""

    def __init__(self, folder: Path, template: str | bytes | None):
        if template is not None:
            data = template if isinstance(template, bytes) else template.encode()
            (folder / "chat_template.jinja").write_bytes(data)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._codec = Codec(FromRenderer)
        self.config = EngineConfig(
            id="e", name="t", epoch="epoch", profile=Profile(name="t", model=ModelConfig(path=str(folder))),
            model_path=str(folder), model_type="opt", layers=[(0, 1)], max_model_len=MAX_MODEL_LEN,
            run_dir=str(folder), ring_dir="/d", started_wall=0.0,
        )  # fmt: skip
        self._socket.bind(self.config.endpoint("render"))
        (folder / "engine.json").write_bytes(msgspec.json.encode(self.config))
        self.answers: list[Encoded] = []
        self.events: list[tuple[str, str]] = []
        self.processes: set[int] = set()
        """Every process of chat templates that this world has seen."""
        self.templates = TemplateProcess(
            folder, self._send_renderer, time.monotonic, lambda kind, text: self.events.append((kind, text))
        )  # fmt: skip
        self.encoder = SubmissionEncoder(Letters(), MAX_MODEL_LEN, self.templates, self.answers.append)
        self._count = 0

    def _send_renderer(self, name, payload):
        self._socket.send_multipart([name, payload], zmq.NOBLOCK)

    def close(self):
        self.templates.close()
        self._socket.close(0)
        self._context.term()

    def chat(self, text):
        """Send a chat and return its id."""
        return self.text(text, chat=True)

    def text(self, text, **fields):
        """Send a prompt and return its id."""
        self._count += 1
        name = f"c{self._count}"
        self.encoder.take(Encode(id=name, submit=Submit(prompt=text, **fields)))
        return name

    def turn(self):
        """Take one turn: messages of the process, and a look at it."""
        if self._socket.poll(10):
            name, payload = self._socket.recv_multipart()
            self.templates.take(name, self._codec.decode(payload))
        self.processes.update(renderers())
        self.templates.advance()

    def until(self, condition, what, timeout=60.0):
        """Take turns until `condition` holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}; {self.said()}"
            self.turn()

    def end_of(self, name, timeout=60.0):
        """Return the answer to a text."""
        self.until(lambda: self.over(name), f"{name} ends", timeout)
        return self.last(name)

    def ids_of(self, name):
        """Return the tokens of a text, which is not refused."""
        end = self.end_of(name)
        assert end.submit is not None, end
        assert end.submit.prompt is None and not end.submit.chat
        return end.submit.prompt_token_ids

    def last(self, name):
        """Return the one answer to a text that has ended."""
        (answer,) = [answer for answer in self.answers if answer.id == name]
        return answer

    def over(self, name):
        """Return whether a text has its one answer."""
        return sum(answer.id == name for answer in self.answers) == 1

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
