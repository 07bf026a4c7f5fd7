"""Steps of running requests while a prompt of 100,000 tokens is submitted, as the console does; CPU of a token's text.

`python tests/end_to_end/bench_long_prompts.py [ROUNDS]`. Four requests run and are read as they grow. The long
prompt is submitted as a dry run, so that it is tokenized and never computed: its prefill would hide the difference.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("engine", "console")]

from operators import Operator  # noqa: E402
from ppengine.checkpoint.growing_text import GrowingText  # noqa: E402
from ppengine.checkpoint.tokenizer import Tokenizer  # noqa: E402
from ppengine.common.config import load_profile  # noqa: E402
from ppengine.protocol.verbs import Submit  # noqa: E402
from serving import Served  # noqa: E402

TINY = Path(__file__).parents[2] / "profiles" / "models" / "tiny"
WORDS = "Once upon a time there was a little dog who lived in a big house with a girl named Lily. "
RUNNING, TOKENS, QUIET_S = 4, 100_000, 8.0


def long_model(folder: Path) -> Path:
    """Return a copy of the bundled model that takes prompts of 131,072 tokens."""
    made = folder / "long"
    shutil.copytree(TINY, made)
    config = json.loads((made / "config.json").read_text())
    config["max_position_embeddings"] = 131_072
    (made / "config.json").write_text(json.dumps(config))
    return made


def long_prompt(tokenizer: Tokenizer) -> str:
    """Return a text of about `TOKENS` tokens."""
    return WORDS * (TOKENS // len(tokenizer.encode(WORDS)))


async def arrivals(op: Operator, name: str, times: list[float]) -> None:
    """Note the times at which tokens of a request come, until it ends."""
    offset = 0
    while True:
        part = await op.link.fetch(name, offset=offset, wait_ms=1000)
        if part.token_ids:
            times.append(time.monotonic())
        offset += len(part.token_ids)
        if part.finished:
            return


def gaps(times: list[float], begin: float, end: float) -> list[float]:
    """Return the milliseconds between tokens that came in a span."""
    inside = [at for at in times if begin <= at <= end]
    return sorted(1e3 * (later - earlier) for earlier, later in itertools.pairwise(inside))


def line(what: str, values: list[float]) -> str:
    """Return quantiles in words."""
    at = [values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.99)]
    return f"{what}: {len(values)} steps, p50 {at[0]:.1f} ms, p99 {at[1]:.1f} ms, most {values[-1]:.1f} ms"


async def measure(served: Served, text: str, rounds: int) -> None:
    """Print the times between tokens, without a long prompt and with one after the other."""
    async with served.operator() as op:
        names = await op.submit_all(["Once upon a time"] * RUNNING, max_tokens=100_000, ignore_eos=True)
        times: list[float] = []
        reader = asyncio.ensure_future(arrivals(op, names[0], times))
        await op.do(Submit(prompt=text), dry_run=True)  # The process is started, the tokenizer loaded.
        await asyncio.sleep(1.0)
        quiet = time.monotonic()
        await asyncio.sleep(QUIET_S)
        begin, took = time.monotonic(), []
        for _ in range(rounds):
            since = time.monotonic()
            outcome = await op.do(Submit(prompt=text), dry_run=True)
            took.append(time.monotonic() - since)
            await asyncio.sleep(0.2)
        end = time.monotonic()
        print(outcome.text)
        print(line("quiet", gaps(times, quiet, begin)))
        print(line(f"{rounds} long prompts", gaps(times, begin, end)))
        print(f"answer to a long prompt after {1e3 * statistics.median(took):.0f} ms")
        await op.abort(*names)
        reader.cancel()


def detokenizing(tokenizer: Tokenizer, count: int = 20_000) -> None:
    """Print the processor time of the text of one token, as the process of texts makes it."""
    ids = tokenizer.encode(WORDS * (count // 20))[:count]
    growing = GrowingText(tokenizer.stream([5]), [], 0)
    began = time.thread_time()
    for token in ids:
        growing.push(token)
    print(f"text of a token: {1e6 * (time.thread_time() - began) / len(ids):.1f} us")


def main() -> None:
    """Start the engine and measure."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory(prefix="pp-long-") as folder:
        model = long_model(Path(folder))
        tokenizer = Tokenizer.load(model)
        settings = [f"model.path={model}", "model.max_model_len=131072", "memory.device_mib=640"]
        with Served(load_profile("tiny", settings)) as served:
            asyncio.run(measure(served, long_prompt(tokenizer), rounds))
        detokenizing(tokenizer)


if __name__ == "__main__":
    main()
