"""Step time and gaps between tokens of running streams, while prompts of 100,000 tokens arrive.

python tests/engine/bench_long_prompt.py [--profile NAME] [--set a.b=c] [--by http|console] [--beside CHECKOUT]

It starts an engine with an HTTP port, keeps `--streams` streams running, and measures rounds in turn: without long
prompts; with one a second that is refused, as it has `max_model_len` tokens or more; and with one a second that is
admitted, if the model takes that many. An admitted prompt is computed, in parts beside the streams, unless the streams
have all places: `--set scheduler.max_num_seqs=4` leaves it waiting, so that its arrival alone is measured.

Without `--profile`, a copy of the bundled model that takes 131,072 tokens is served. Other profiles need a tokenizer in
the folder of the model: `--set model.path=FOLDER --set model.skip_tokenizer=false`. With `--by console` the prompts are
submitted as by the console. A round beside which other work takes more than `--others` processors is repeated. With
`--beside`, another checkout serves as well, and both are measured in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from long_prompt_load import LONGEST, ROOT, Streams, Texts, long_model, quantiles
from long_prompt_senders import Answered, ConsoleSender, HttpSender, Sender
from ppengine.agent.stage_watch import RingFile
from ppengine.agent.step_history import History
from ppengine.bench.online_servers import EngineServer
from ppengine.bench.process_cpu import cpu_by_module
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import EngineConfig, Profile, load_profile

PROMPT = 100_000
KINDS = ("without", "refused", "admitted")
REST_S, WARM_S = 0.5, 1.0
"""Seconds after a round, and before the first one."""
LOOK_S = 0.1


def children(pid: int) -> list[tuple[int, list[bytes]]]:
    """Return the children of a process, and theirs, with the words of their command lines."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            with contextlib.suppress(OSError):
                found.append((child, Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")))
                found += children(child)
    return found


def busy_s() -> float:
    """Return the seconds so far in which processors were busy."""
    times = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Round:
    """One measurement. Times are in ms; those of steps are of the slowest stage."""

    step: tuple[float, float]
    gap: tuple[float, float]
    answered: Answered
    texts_cpu: float
    """CPU seconds a second of HTTP processes, `texts` and their children."""
    waited: float
    """Seconds a second in which threads of stages and core could run and had no processor."""
    others: float
    """Processors that were busy with other work than the engine and this process."""


class Side:
    """The engine of one checkout, its streams, and the senders of long prompts."""

    def __init__(self, checkout: Path, profile: Profile, options: argparse.Namespace) -> None:
        self.name = checkout.name
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = ":".join(str(checkout / each) for each in ("console", "engine", "kernels"))
        try:
            self.server = EngineServer(msgspec.structs.replace(profile, name=f"bench-{checkout.name}"))
        finally:
            os.environ.pop("PYTHONPATH")
            os.environ |= {} if before is None else {"PYTHONPATH": before}
        engine = self.server.llm.llm_engine
        self._pid = engine.supervisor_pid
        self.config = EngineConfig.load(Path(engine.run_dir) / "engine.json")
        host, _, port = self.server.target.removeprefix("http://").rpartition(":")
        self._address = host, int(port)
        self._options = options
        self._sender: Sender = HttpSender(self._address, options.every)
        if options.by == "console":
            self._sender = ConsoleSender(engine.engine_id, options.every)
        self._steppers = [pid for pid, words in children(self._pid) if b"ppengine.core" in words or b"--stage" in words]
        self.streams: Streams | None = None

    def begin(self) -> None:
        """Begin the streams."""
        self.streams = Streams(self._address, self._options.streams, self._options.output)
        time.sleep(WARM_S)

    def end(self) -> None:
        """End the streams; they are closed at their next token."""
        if self.streams is not None:
            self.streams.ended = True
            time.sleep(REST_S)

    def quiet_round(self, texts: Texts | None) -> Round:
        """Measure once, again while other work takes more of the processors than `--others`."""
        while True:
            until_quiet(self._options.others)
            self.begin()
            one = self.round(texts, self._options.seconds)
            self.end()
            if one.others <= self._options.others:
                return one

    def round(self, texts: Texts | None, seconds: float) -> Round:
        """Measure once, with one of `texts` a second."""
        assert self.streams is not None
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(Steps(self.config, place)) for place in range(len(self.config.layers))]
            self.streams.take()
            cpu, waited, busy, began = self._cpu(), self._waited(), busy_s(), time.monotonic()
            answered, sender = Answered(), None
            if texts is not None:
                sender = threading.Thread(target=self._sender.send, args=(texts, began + seconds, answered))
                sender.start()
            while (left := began + seconds - time.monotonic()) > 0:
                time.sleep(min(left, LOOK_S))
                for each in files:
                    each.file.read()
            gaps, steps = self.streams.take(), [each.quantiles() for each in files]
            took = time.monotonic() - began
            own, ours = (after - before for after, before in zip(self._cpu(), cpu, strict=True))
            waits, others = (self._waited() - waited) / took, (busy_s() - busy - ours) / took
            if sender is not None:
                sender.join()
        step = max(each[0] for each in steps), max(each[1] for each in steps)
        return Round(step, quantiles(gaps), answered, own / took, waits, others)

    def _cpu(self) -> tuple[float, float]:
        """Return the CPU seconds of the processes that tokenize, and of all of the engine and this process."""
        cpu = cpu_by_module(self._pid)
        return sum(cpu.get(name, 0.0) for name in ("http", "texts", "templates")), sum(
            cpu.values(), time.process_time()
        )

    def _waited(self) -> float:
        files = [path for pid in self._steppers for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(path.read_text().split()[1]) for path in files) / 1e9

    def close(self) -> None:
        self.server.close()


class Steps:
    """The steps of one stage while the block lasts, as the agent reads them."""

    def __init__(self, config: EngineConfig, stage: int) -> None:
        path = Path(config.ring_dir) / f"s{stage}.0.main.ring"
        self.file = RingFile(path, path.stat().st_ino, History())

    def __enter__(self) -> Steps:
        self.file.read()  # Those before.
        past = self.file.track
        self.file.track = History()
        self.file.track.seen = past.seen
        return self

    def __exit__(self, *_: object) -> None:
        self.file.reader.close()

    def quantiles(self) -> tuple[float, float]:
        """Return p50 and p99 of a step's own work in ms: without waits for other stages."""
        self.file.read()
        track = self.file.track
        assert isinstance(track, History)
        p50, p99 = track.step_ms(time.monotonic_ns())
        if p50 is None or p99 is None:
            raise SystemExit("a round had no step")
        return p50, p99


def until_quiet(others: float) -> None:
    """Wait until processors are that idle, with no stream of this bench."""
    while others < math.inf:
        before = busy_s()
        time.sleep(REST_S)
        if (busy_s() - before) / REST_S <= others:
            return


def rounds_of(sides: list[Side], texts: dict[str, Texts], options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield side and kind of each round: sides and kinds take turns, forwards and backwards."""
    kinds = [kind for kind in KINDS if kind == "without" or kind in texts]
    turns = [(side.name, kind) for kind in kinds for side in sides]
    for number in range(options.rounds):
        yield from reversed(turns) if number % 2 else turns


def measure(sides: list[Side], texts: dict[str, Texts], options: argparse.Namespace) -> None:
    """Print all rounds and their ratios."""
    by_name, found = {side.name: side for side in sides}, defaultdict[tuple[str, str], list[Round]](list)
    for turn in rounds_of(sides, texts, options):
        name, kind = turn
        one = by_name[name].quiet_round(texts.get(kind))
        found[turn].append(one)
        took = one.answered.ms
        answers = f"{len(took)} x {one.answered.said}, {statistics.median(took):.0f} ms" if took else ""
        print(
            f"{name} {kind:>8}: step p50 {one.step[0]:6.2f} p99 {one.step[1]:7.2f} ms  gap p50 {one.gap[0]:6.2f} "
            f"p99 {one.gap[1]:7.2f} ms  waits {one.waited:4.2f}  "
            f"CPU of texts {one.texts_cpu:4.2f} others {one.others:4.2f}  {answers}", flush=True,
        )  # fmt: skip
    for (name, kind), rounds in sorted(found.items(), key=lambda item: (item[0][0], KINDS.index(item[0][1]))):
        quiet = found[name, "without"]
        answers = [each for one in rounds for each in one.answered.ms]
        after = f"  answers after {ms(answers)} ms" if answers else ""
        print(f"{name} {kind:>8}: " + "  ".join(
            f"{what} {ms(values)} ms{'' if kind == 'without' else f' ({ratio(values, others)})'}"
            for what, values, others in (
                (f"{figure} {share}", [getattr(one, figure)[at] for one in rounds],
                 [getattr(one, figure)[at] for one in quiet])
                for figure in ("step", "gap") for at, share in enumerate(("p50", "p99"))
            )
        ) + f"  waits {statistics.median(one.waited for one in rounds):.2f}" + after)  # fmt: skip


def ms(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}"


def ratio(values: list[float], others: list[float]) -> str:
    """Return the median and the range of the quotients, round by round."""
    each = [one / other for one, other in zip(values, others, strict=True)]
    return f"x {statistics.median(each):.2f}, {min(each):.2f} to {max(each):.2f}"


def main() -> None:
    """Start one engine or two, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="without it: the bundled model with longer contexts")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--by", choices=("http", "console"), default="http")
    parser.add_argument("--kinds", nargs="+", choices=KINDS[1:], default=KINDS[1:])
    parser.add_argument("--beside", type=Path, help="another checkout")
    for name, default in (("streams", 4), ("output", 512), ("rounds", 3), ("seconds", 3.0), ("every", 1.0),
                          ("others", math.inf)):  # fmt: skip
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        name, settings = options.profile, []
        if name is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pp-long-")))
            name, settings = "tiny", [f"model.path={long_model(folder)}", f"model.max_model_len={LONGEST}"]
            settings.append("memory.device_mib=640")
        profile = load_profile(name, [*settings, *options.settings])
        sides = []
        for checkout in [ROOT] if options.beside is None else [options.beside.resolve(), ROOT]:
            sides.append(Side(checkout, profile, options))
            stack.callback(sides[-1].close)
        longest, tokenizer = sides[0].config.max_model_len, Tokenizer.load(Path(sides[0].config.model_path))
        texts = {}
        if "refused" in options.kinds:
            texts["refused"] = Texts(tokenizer, max(PROMPT, longest))
        if "admitted" in options.kinds and longest > PROMPT + PROMPT // 50:
            texts["admitted"] = Texts(tokenizer, PROMPT)
        if (most := longest * tokenizer.longest_token) < max((each.characters for each in texts.values()), default=0):
            print(f"texts of more than {most} characters are refused before they are tokenized; raise max_model_len")
        words = ", ".join(f"{kind} {each.tokens}" for kind, each in texts.items())
        print(f"max_model_len {longest}, tokens of the prompts: {words}, {options.streams} streams, by {options.by}")
        measure(sides, texts, options)


if __name__ == "__main__":
    sys.exit(main())
