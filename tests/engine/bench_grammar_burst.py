"""Time of a grammar process for grammars that come together and are all new.

    python tests/engine/bench_grammar_burst.py [--model FOLDER] [--threads MASKS/COMPILE ...] [--rounds N]

`checks`: 256 schemas are checked, as before their requests are admitted. `outputs`: 64 schemas are compiled for the
masks of outputs, and the first mask of each output is made. Questions come in messages of 16. The process is this one,
without its socket.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import time
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench_structured import MODEL, schema
from ppengine.checkpoint.model_spec import read_spec
from ppengine.common.system_memory import keep_freed_memory
from ppengine.grammar.__main__ import Process
from ppengine.grammar.matchers import Matchers
from ppengine.protocol.frames import Codec
from ppengine.protocol.grammar_messages import Answers, Question, Questions
from ppengine.protocol.structured_outputs import Grammar

_numbers = count(1)
_decode = Codec(Answers).decode


def burst(process: Process, sent: list[bytes], size: int, outputs: bool) -> float:
    """Return the seconds until all answers are there."""
    questions = [
        Question(number, number if outputs else 0, Grammar("json", json.dumps(schema(number)), ""), [], [], 0)
        for number in islice(_numbers, size)
    ]
    sent.clear()
    began = time.monotonic()
    for first in range(0, size, 16):
        process._take(Questions(questions[first : first + 16]))
    answered = 0
    while answered < size:
        select.select([process._compilers.wake], [], [])
        process._compilers.woken()
        while process._compilers.ready:
            process._take_compiled()
        answered = sum(len(_decode(message).numbers) for message in sent)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--threads", nargs="+", default=["1/4", "4/4", "16/16"])
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    keep_freed_memory()
    spec = read_spec(Path(arguments.model))
    print("threads of masks/compiles  checks of 256, ms    outputs of 64, ms")
    for threads in arguments.threads:
        masks, compilers = map(int, threads.split("/"))
        sent: list[bytes] = []
        socket: Any = SimpleNamespace(send=sent.append)
        process = Process(
            Matchers(Path(arguments.model), spec.vocab_size, spec.eos_token_ids, masks), socket, compilers
        )
        burst(process, sent, 16, False)
        columns = []
        for size, outputs in ((256, False), (64, True)):
            took = [1e3 * burst(process, sent, size, outputs) for _ in range(arguments.rounds)]
            columns.append(f"{statistics.median(took):6.1f} ({min(took):.1f} to {max(took):.1f})")
        print(f"{threads:>25}  {'  '.join(columns)}", flush=True)


if __name__ == "__main__":
    main()
