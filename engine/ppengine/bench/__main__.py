"""`python -m ppengine.bench PROFILE ...`: prints one JSON line a measurement and a short table last."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ppengine.bench.beside import Works, beside_vllm, check_installed
from ppengine.bench.breakdown import Breakdown, StageTimes, slowest, table
from ppengine.bench.command_line import (
    Overdue,
    Parser,
    above_zero,
    at_least_one,
    overdue_after,
    rate,
    run,
    share,
    to_stderr,
)
from ppengine.bench.named_workloads import WORKLOADS
from ppengine.bench.online import Choices, Online
from ppengine.bench.online_figures import parse_slo
from ppengine.bench.rates import Rates, limit_seconds, measured
from ppengine.bench.server_address import parse_target
from ppengine.bench.sides import Baseline, run_engine
from ppengine.bench.workload import Job, file_jobs, of_round, random_jobs
from ppengine.checkpoint.model_spec import ModelSpec, read_spec
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import ConfigError, EngineConfig, load_profile
from ppengine.common.partition import best_partition, longest_ms
from ppengine.hub.fetch import fetch_model
from ppengine.offline.launch import EngineError
from ppengine.offline.llm import LLM
from ppengine.protocol.error_text import PREFIX, one_line


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = Parser(prog="ppconsole bench", description=__doc__)
    parser.add_argument("profile")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="a.b=c")
    parser.add_argument(
        "--workload",
        choices=list(WORKLOADS),
        nargs="+",
        default=[],
        help="requests of the docs by name; no transformers",
    )
    parser.add_argument("--scale", type=share, default=1.0, metavar="F", help="of the workload's counts and lengths")
    parser.add_argument("--beside", choices=["vllm"], help="the same requests there, in place of transformers")
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PATH", help="Python that has vLLM")
    parser.add_argument("--requests", type=at_least_one, default=32)
    parser.add_argument("--prompt-len", default="16:128", metavar="LO:HI")
    parser.add_argument("--output-len", type=at_least_one, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--rounds", type=at_least_one, help="alternating rounds a side: 5, online 3 by default")
    parser.add_argument("--no-baseline", action="store_true", help="the engine alone")
    parser.add_argument("--gbps", type=rate, help="of the device, for the limit; without it, what a copy here reaches")
    parser.add_argument("--tflops", type=rate, help="of the device, for the limit; without it, what a product reaches")
    online = parser.add_argument_group("online", "requests that arrive at random, over HTTP")
    online.add_argument("--online", action="store_true", help="measure the HTTP port of the engine")
    online.add_argument("--rate", type=rate, action="append", default=[], metavar="R", help="requests a second")
    online.add_argument(
        "--load", type=rate, nargs="+", default=[], metavar="%", help="of the highest rate: 50 80 95 by default"
    )
    online.add_argument("--url", metavar="http://HOST:PORT|unix:/PATH", help="a server that runs, of any kind")
    online.add_argument("--slo", metavar="ttft_ms=X,itl_ms=Y", help="limits of a good request; tpot_ms, e2e_ms too")
    online.add_argument("--beside-args", default="", metavar="WORDS", help="added to the command of vllm serve")
    parser.add_argument("--json", action="store_true", help="only the JSON lines on stdout, the tables on stderr")
    parser.add_argument("--timeout", type=above_zero, metavar="S", help="give up after S seconds (exit code 5)")
    return parser.parse_args()


def make_rounds(arguments: argparse.Namespace, folder: Path, vocab: int) -> Works:
    """Return the rounds of each workload, without end. Raises ConfigError.

    Prompts are new in every round: the engine keeps the blocks of those it has seen, and would be measured without its
    prefill. Those of a file differ in their first token.
    """
    if arguments.workload:
        named = {name: WORKLOADS[name].scaled(arguments.scale) for name in arguments.workload}
        return {name: map(partial(work.jobs, vocab), itertools.count()) for name, work in named.items()}
    if arguments.prompts is not None:
        tokenizer = functools.cache(partial(Tokenizer.load, folder))
        jobs = file_jobs(arguments.prompts, arguments.output_len, lambda text: tokenizer().encode(text))
        return {arguments.prompts.name: (of_round(jobs, number, vocab) for number in itertools.count())}
    low, _, high = arguments.prompt_len.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        raise ConfigError(f"--prompt-len {arguments.prompt_len}: write it as LO:HI, for example 16:128") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise ConfigError(f"--prompt-len {arguments.prompt_len}: LO must be at least 1 and at most HI")
    fixed = (vocab, arguments.requests, *bounds, arguments.output_len, arguments.seed)
    return {"random": map(partial(random_jobs, *fixed), itertools.count())}


def check_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that exclude each other."""
    online = {"--rate": arguments.rate, "--load": arguments.load, "--url": arguments.url, "--slo": arguments.slo}
    if not arguments.online and (given := [option for option, value in online.items() if value]):
        raise ConfigError(f"{given[0]} is for online measurements; add --online")
    if arguments.online and len(arguments.workload) > 1:
        raise ConfigError(f"--online measures one workload; choose one of {', '.join(arguments.workload)}")
    if not arguments.workload:
        if arguments.scale != 1.0:
            raise ConfigError("--scale shrinks a --workload; name one")
        return
    own = {"--requests": 32, "--prompt-len": "16:128", "--output-len": 64, "--prompts": None, "--seed": 0}
    for option, default in own.items():
        if getattr(arguments, option[2:].replace("-", "_")) != default:
            raise ConfigError(f"--workload {' '.join(arguments.workload)} has its own requests; leave {option} away")


def online_choices(arguments: argparse.Namespace) -> Choices:
    """Return the arguments of an online measurement. Raises ConfigError."""
    if arguments.rate and arguments.load:
        raise ConfigError("--rate and --load exclude each other: give rates, or shares of the highest one")
    if arguments.url and arguments.beside:
        raise ConfigError("--url is one server by itself; leave --beside away")
    if arguments.url:
        try:
            parse_target(arguments.url)
        except ValueError as error:
            raise ConfigError(f"--url {error}") from None
    if missing := [name for name in ("httptools", "uvloop") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"--online needs {', '.join(missing)}: pip install 'ppconsole[engine,serve]'")
    return Choices(
        rates=arguments.rate, loads=arguments.load or ([] if arguments.rate else [50.0, 80.0, 95.0]),
        rounds=arguments.rounds or 3, seed=arguments.seed, slo=parse_slo(arguments.slo) if arguments.slo else None,
        baseline=not arguments.no_baseline, url=arguments.url, beside=bool(arguments.beside),
        vllm_python=arguments.vllm_python, beside_words=arguments.beside_args,
    )  # fmt: skip


def check_lengths(jobs: list[Job], longest: int) -> None:
    """Raise ConfigError for a job that is longer than what the model serves: its output would be cut short."""
    for number, job in enumerate(jobs):
        if len(job.prompt) + job.output_len > longest:
            raise ConfigError(
                f"request {number}: {len(job.prompt)} prompt and {job.output_len} output tokens are more than the "
                f"{longest} that the model serves; lower --prompt-len, --output-len or --scale"
            )


def say(**figures: object) -> None:
    """Print one measurement, also where the tables go elsewhere."""
    print(json.dumps(figures), file=sys.__stdout__, flush=True)


def against_baseline(llm: LLM, work: Iterator[list[Job]], baseline: Baseline, rounds: int) -> None:
    """Alternate both sides and print tokens a second and the ratio of the medians.

    A round of both that does not count comes first: the engine has idled while transformers loaded.
    """
    jobs = next(work)
    run_engine(llm, jobs)
    baseline.run(jobs)
    ours, theirs = [], []
    for number in range(rounds):
        jobs = next(work)
        tokens = sum(job.output_len for job in jobs)
        ours.append(tokens / run_engine(llm, jobs))
        theirs.append(tokens / baseline.run(jobs))
        say(round=number, engine_tok_s=round(ours[-1], 1), transformers_tok_s=round(theirs[-1], 1))
    ratio = statistics.median(ours) / statistics.median(theirs)
    say(rounds=rounds, ratio=round(ratio, 3))
    pairs = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"engine       {statistics.median(ours):9.1f} output tokens/s (median of {rounds})")
    print(f"transformers {statistics.median(theirs):9.1f} output tokens/s, generate with padding, same cores")
    spread = f"pairs {pairs[0]:.2f} to {pairs[-1]:.2f}" if rounds > 1 else "from one pair; --rounds 3 gives a spread"
    print(f"ratio        {ratio:9.2f} ({spread})")


def measure_alone(llm: LLM, name: str, work: Iterator[list[Job]], rounds: int) -> None:
    """Print tokens a second of each round of a workload, and the median."""
    found = []
    for number in range(rounds):
        jobs = next(work)
        found.append(sum(job.output_len for job in jobs) / run_engine(llm, jobs))
        say(workload=name, round=number, engine_tok_s=round(found[-1], 1))
    print(f"{name:14} {statistics.median(found):9.1f} output tokens/s (median of {rounds})")


def explain(llm: LLM, jobs: list[Job], spec: ModelSpec, rates: Rates, arguments: argparse.Namespace) -> None:
    """Run once more, look at what the stages record meanwhile, and print where the time went, beside the limit."""
    config = EngineConfig.load(Path(llm.llm_engine.run_dir) / "engine.json")
    # A tied table of a single stage is read whole by the head.
    looked_up = spec.vocab_size * (spec.embed_dim or spec.hidden_size) * rates.item_bytes
    with Breakdown(config, 0 if spec.tie_word_embeddings and config.stages == 1 else looked_up) as seen:
        seconds = run_engine(llm, jobs)
    made = sum(job.output_len for job in jobs)
    ranks = config.groups.tensor
    gbps, tflops = ranks * (arguments.gbps or rates.copy_gbps), ranks * (arguments.tflops or rates.product_tflops)
    limit = made / limit_seconds(spec, rates.item_bytes, jobs, config.stages, gbps, tflops)
    speed = made / seconds
    say(
        device=rates.device, copy_gbps=rates.copy_gbps, product_tflops=rates.product_tflops, limit_gbps=gbps,
        limit_tflops=tflops, engine_tok_s=round(speed, 1), limit_tok_s=round(limit, 1),
        of_limit=round(speed / limit, 4),
    )  # fmt: skip
    for stage in seen.stages:
        say(**dataclasses.asdict(stage), of_copy=round(stage.gbps / rates.copy_gbps, 4))
    print(f"one more round {speed:9.1f} output tokens/s, {speed / limit:.3f} of the limit {limit:,.1f}: what")
    print(f"               {gbps:,.1f} GB/s and {tflops:,.3f} TFLOP/s a stage allow ({rates.device})")
    print("\n".join(table(seen.stages, rates.copy_gbps)) if seen.stages else f"no breakdown: {seen.problem}")
    if len(config.layers) > 1 and seen.stages:
        print(advice([end - start for start, end in config.layers], slowest(seen.stages)))


def advice(layers: list[int], stages: list[StageTimes]) -> str:
    """Return how the layers would be spread best by what they took; there are two stages at least."""
    on_device = [stage.on_device.ms for stage in stages if stage.on_device is not None]
    if len(on_device) == len(stages):
        # A device's time has no parts: what the last stage has beyond its layers, as the others have them, is the head.
        layer_ms = sum(on_device[:-1]) / sum(layers[:-1])
        extra_ms = [0.0] * (len(stages) - 1) + [max(0.0, on_device[-1] - layers[-1] * layer_ms)]
    else:
        layer_ms = sum(stage.layers_ms for stage in stages) / sum(layers)
        extra_ms = [stage.own_ms - stage.layers_ms for stage in stages]
    best = best_partition(sum(layers), layer_ms, extra_ms)
    now, then = (longest_ms(counts, layer_ms, extra_ms) for counts in (layers, best))
    if then >= now:
        return f"layers {layers} are spread as well as can be: the longest stage has {now:.2f} ms a micro-batch"
    return f"layers {layers}: {now:.2f} ms on the longest stage; {then:.2f} with --set 'parallel.partition={best}'"


def main() -> int:
    """Run the benchmark. Exit codes as the CLI's: 1 error, 2 usage, 5 --timeout is over, 130 interrupted."""
    arguments = parse()
    try:
        overdue_after(arguments.timeout)
        with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            return bench(arguments)
    except Overdue:
        overdue_after(None)
        print(f"error: not done within {arguments.timeout:g} s", file=sys.stderr)
        return 5
    except KeyboardInterrupt:
        return 130


def bench(arguments: argparse.Namespace) -> int:
    """Start the engine and measure; return the exit code."""
    try:
        profile = load_profile(arguments.profile, arguments.settings)
        alone = arguments.no_baseline or bool(arguments.workload) or arguments.online
        check_options(arguments)
        choices = online_choices(arguments) if arguments.online else None
        if profile.model.load_format == "dummy" and not alone and not arguments.beside:
            raise ConfigError("model.load_format is dummy: transformers has no weights to compare; add --no-baseline")
        fetch_model(profile.model, to_stderr)
        folder = Path(profile.model.path)
        spec = read_spec(folder)
        works = make_rounds(arguments, folder, spec.vocab_size)
        firsts = {name: next(work) for name, work in works.items()}
        for jobs in firsts.values():
            check_lengths(jobs, profile.model.max_model_len or spec.max_model_len)
    except ConfigError as error:
        print(f"{PREFIX}{one_line(str(error))}", file=sys.stderr)
        return 2
    cores = len(os.sched_getaffinity(0))
    requests = sum(map(len, firsts.values()))
    say(profile=profile.name, requests=requests, stages=profile.parallel.pipeline, cores=cores)
    try:
        if arguments.beside:
            check_installed(arguments.vllm_python)
        if choices is not None:
            (work,) = works.values()
            Online(profile, work, choices, say).run()
            return 0
        rounds = arguments.rounds or 5
        if arguments.beside:
            beside_vllm(profile, works, rounds, arguments.vllm_python, say)
            return 0
        threads = profile.threads_per_stage or max(1, cores // profile.parallel.pipeline)
        rates = measured(profile, spec, threads)
        with LLM(profile) as llm:
            for name, work in works.items():
                run_engine(llm, firsts[name])
                if alone:
                    measure_alone(llm, name, work, rounds)
                else:
                    dtype = "float32" if profile.model.dtype == "auto" else profile.model.dtype
                    against_baseline(llm, work, Baseline(folder, dtype), rounds)
                explain(llm, next(work), spec, rates, arguments)
    except (EngineError, ValueError) as error:
        print(f"{PREFIX}{one_line(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
