"""Coverage of a folder of JSON schemas: `python tests/engine/bench_schemas.py FOLDER [SET...]`.

The folder is `maskbench/data` of JSONSchemaBench (arXiv 2501.10868): files `SET---NAME.json`, each with a `schema` and
`tests`, which are instances and whether they are valid. Each schema passes the checks of a request. Then a grammar
process with its limits compiles it, and takes the tokens of each instance. It prints a row a set.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
from grammar_world import allowed
from ppengine.checkpoint.model_spec import read_spec
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import ModelConfig
from ppengine.core.grammar_asks import Ask, Masked
from ppengine.core.grammar_process import GrammarProcess
from ppengine.protocol.frames import Codec
from ppengine.protocol.grammar_messages import FromGrammars
from ppengine.protocol.structured_outputs import Grammar, StructuredOutputsParams

MODEL = Path(__file__).resolve().parents[2] / "profiles" / "models" / "tiny"
EOS = 0
"""Token that may follow a complete text."""


class Grammars:
    """A grammar process and the socket of the core."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        config = EngineConfig(
            id="abcdef", name="bench", epoch="e", profile=Profile(name="bench", model=ModelConfig(path=str(MODEL))),
            model_path=str(MODEL), model_type="llama", layers=[(0, 1)], max_model_len=4096, run_dir=str(folder),
            ring_dir=str(folder), started_wall=0.0,
        )  # fmt: skip
        (folder / "engine.json").write_bytes(msgspec.json.encode(config))
        self._socket, self._codec = context.socket(zmq.ROUTER), Codec(FromGrammars)
        self._socket.bind(config.endpoint("grammar"))
        self.process = GrammarProcess(
            folder, read_spec(MODEL).vocab_size, self._send, time.monotonic, self._report, "checks"
        )
        self.deaths = 0
        self._matchers = 0

    def ask(self, grammar: Grammar, outputs: list[list[int]] | None = None) -> list[Masked]:
        """Compile a grammar, or return the masks behind outputs of it."""
        answers: dict[int, Masked] = {}
        first = self._matchers + 1
        numbers = [0] if outputs is None else list(range(first, first + len(outputs)))
        for number, tokens in zip(numbers, outputs or [[]], strict=True):
            end = self._end(answers, number)
            self.process.ask(Ask(number, grammar, tokens, (), end))
        self._matchers += len(outputs or ())
        while len(answers) < len(numbers):
            self.process.advance()
            if self._socket.poll(20):
                name, payload = self._socket.recv_multipart()
                self.process.take(name, self._codec.decode(payload))
        self.process.forget([number for number in numbers if number])
        return [answers[number] for number in numbers]

    @staticmethod
    def _end(answers: dict[int, Masked], number: int) -> Any:
        return lambda masked: answers.update({number: masked})

    def _send(self, name: bytes, payload: bytes) -> None:
        self._socket.send_multipart([name, payload])

    def _report(self, kind: str, text: str) -> None:
        self.deaths += 1


@dataclass
class Counts:
    """One set."""

    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    valid: int = 0
    taken: int = 0
    invalid: int = 0
    caught: int = 0
    right: int = 0
    """Schemas that compile, and whose instances are all judged right."""
    seconds: list[float] = field(default_factory=list)
    """Time of each compile that succeeded."""

    def row(self, name: str) -> str:
        """Return a row of Markdown."""
        compiled, took = len(self.seconds), sorted(self.seconds) or [0.0]
        times = "/".join(f"{1e3 * took[int(share * (len(took) - 1))]:.1f}" for share in (0.5, 0.99, 1))
        instances = f"{self.taken}/{self.valid} | {self.caught}/{self.invalid}"
        share = f"{100 * compiled / self.schemas:.1f}"
        return f"| {name} | {self.schemas} | {compiled} | {share} | {self.right} | {instances} | {times} |"


def check(grammars: Grammars, tokenizer: Tokenizer, case: dict[str, Any], counts: Counts) -> None:
    """Count one file."""
    counts.schemas += 1
    try:
        grammar = StructuredOutputsParams(json=msgspec.json.encode(case["schema"]).decode()).compiled_form
    except ValueError as error:
        counts.refused[f"request: {error}"[:60]] += 1
        return
    began = time.monotonic()
    (masked,) = grammars.ask(grammar)
    if masked.error:
        counts.refused[masked.error[:60]] += 1
        return
    counts.seconds.append(time.monotonic() - began)
    tests = case.get("tests", [])
    outputs = [tokenizer.encode_chat(msgspec.json.encode(one["data"]).decode()) for one in tests]
    right = True
    for one, masked in zip(tests, grammars.ask(grammar, outputs) if outputs else [], strict=True):
        ends = not masked.error and masked.mask is not None and EOS in allowed(masked.mask)
        right = right and ends == one["valid"]
        if one["valid"]:
            counts.valid, counts.taken = counts.valid + 1, counts.taken + ends
        else:
            counts.invalid, counts.caught = counts.invalid + 1, counts.caught + (not ends)
    counts.right += right


def cases(folder: Path, wanted: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the files with the names of their sets."""
    for path in sorted(folder.glob("*---*.json")):
        name = path.name.partition("---")[0]
        if not wanted or name in wanted:
            yield name, msgspec.json.decode(path.read_bytes())


def main() -> None:
    """Print a row a set, and the reasons of refusals."""
    folder, *wanted = sys.argv[1:]
    sets: dict[str, Counts] = {}
    with tempfile.TemporaryDirectory(prefix="pp-", dir="/tmp") as run_dir, zmq.Context() as context:
        grammars, tokenizer = Grammars(context, Path(run_dir)), Tokenizer.load(MODEL)
        for name, case in cases(Path(folder), wanted):
            check(grammars, tokenizer, case, sets.setdefault(name, Counts()))
        grammars.process.close()
        context.destroy(linger=0)
    for name, counts in sets.items():
        print(counts.row(name))
    reasons: Counter[str] = sum((one.refused for one in sets.values()), Counter())
    for reason, count in reasons.most_common(25):
        print(f"{count:5d} {reason}")
    print(f"{grammars.deaths} grammar processes ended")


if __name__ == "__main__":
    main()
