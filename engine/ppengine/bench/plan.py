"""`python -m ppengine.bench.plan MODEL ...`: layouts pipeline x tensor, their room and expected tokens a second."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from ppengine.bench.command_line import Overdue, Parser, above_zero, at_least_one, overdue_after, rate, run, to_stderr
from ppengine.bench.costs import Costs, GivenRates, Load, costs_of_rates
from ppengine.bench.host_rates import measured_host, write_small
from ppengine.bench.layouts import Layout, Machine, all_layouts, choose, estimate, lay_out
from ppengine.bench.place_rates import Wanted, measured_costs
from ppengine.bench.rates import Rates, measured
from ppengine.checkpoint.model_spec import ModelSpec, read_spec
from ppengine.common.config import ConfigError, Profile, load_profile
from ppengine.common.sizes import size_text
from ppengine.common.system_memory import system_memory
from ppengine.hub.fetch import fetch_model
from ppengine.offline.arguments import make_profile
from ppengine.offline.launch import EngineError
from ppengine.protocol.error_text import PREFIX, one_line

HOP_US, REDUCE_US, LINK_GBPS = 20.0, 5.3, 200.0
"""Messages of cards, if no option gives them, as measured on two H200: a hop in a CUDA graph, the fixed time of an
all-reduce in an engine, and the rate of large ones.

An all-reduce of 8 KiB takes 3.4 us by itself; an engine waits for the later rank.
"""
STEP_US, LAYER_US = 200.0, 30.0
"""Times of cards, likewise: the part of a decode step in which nothing runs on the card, and the time by which a layer
with more than one token takes longer than its bytes do."""
_HANDLE_BYTES = 2 << 20
_GIB = 1 << 30


class Plan(msgspec.Struct, kw_only=True):
    """The answer, as `--json` prints it."""

    model: str
    device: str
    places: int
    memory_bytes: int
    """Memory of a card, or of the host whose CPU places share it."""
    load: Load
    layouts: list[Layout]
    take: str | None
    """`pipeline x tensor`; None: nothing fits."""
    why: str
    costs: Costs


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = Parser(prog="ppconsole plan", description=__doc__)
    parser.add_argument("model", help="a profile, or a Hugging Face folder")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="a.b=c")
    parser.add_argument("--cards", type=at_least_one, metavar="N", help="most cards, or processes on a CPU")
    parser.add_argument("--memory", type=rate, metavar="GIB", help="of a card; on a CPU of each process")
    parser.add_argument("--requests", type=at_least_one, default=32, metavar="R")
    parser.add_argument("--input", type=at_least_one, default=128, metavar="LEN", help="tokens of a prompt")
    parser.add_argument("--output", type=at_least_one, default=64, metavar="LEN", help="tokens of an answer")
    parser.add_argument("--gbps", type=rate, help="memory rate of a card; with --tflops nothing is measured")
    parser.add_argument("--tflops", type=rate, help="product rate of a card")
    parser.add_argument("--hop-us", type=rate, default=HOP_US, help=f"of cards: a message to the next stage ({HOP_US})")
    parser.add_argument(
        "--reduce-us", type=rate, default=REDUCE_US, help=f"of cards: an all-reduce of two ranks ({REDUCE_US})"
    )
    parser.add_argument(
        "--link-gbps", type=rate, default=LINK_GBPS, help=f"of cards: rate of large messages ({LINK_GBPS})"
    )
    parser.add_argument(
        "--step-us", type=rate, default=STEP_US, help=f"of cards: idle time of a decode step ({STEP_US})"
    )
    parser.add_argument(
        "--layer-us", type=rate, default=LAYER_US, help=f"of cards: a layer's time beside reading ({LAYER_US})"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--timeout", type=above_zero, metavar="S", help="give up after S seconds (exit code 5)")
    return parser.parse_args()


def main() -> int:
    """Print a plan. Exit codes as the CLI's: 1 error, 2 usage, 5 --timeout is over, 8 nothing fits, 130 interrupted."""
    arguments = parse()
    overdue_after(arguments.timeout)
    try:
        plan = make_plan(arguments)
    except ConfigError as error:
        print(f"{PREFIX}{one_line(str(error))}", file=sys.stderr)
        return 2
    except Overdue:
        print(f"error: not done within {arguments.timeout:g} s", file=sys.stderr)
        return 5
    except (EngineError, ValueError) as error:
        print(f"{PREFIX}{one_line(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(msgspec.json.encode(plan).decode() if arguments.json else "\n".join(text(plan)))
    return 0 if plan.take else 8


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan. Raises ConfigError, EngineError, and ValueError if rates cannot be measured."""
    profile = profile_of(arguments.model, arguments.settings)
    fetch_model(profile.model, to_stderr, weights=False)
    spec = read_spec(Path(profile.model.path))
    load = Load(requests=arguments.requests, input=arguments.input, output=arguments.output)
    longest = profile.model.max_model_len or spec.max_model_len
    if load.input + load.output > longest:
        raise ConfigError(f"--input {load.input} and --output {load.output} are more than the {longest} it serves")
    given = arguments.gbps is not None and arguments.tflops is not None
    if (arguments.gbps is None) != (arguments.tflops is None):
        raise ConfigError("--gbps and --tflops belong together: give both, or none")
    machine = machine_of(arguments, profile, given)
    item_bytes = item_bytes_of(profile, spec, machine.cards)
    profiles = {
        stages: profile_of(arguments.model, arguments.settings, stages) for stages in range(1, machine.places + 1)
    }
    layouts = [
        lay_out(spec, profiles[stages], machine, item_bytes, load, stages, ranks)
        for stages, ranks in all_layouts(machine.places)
    ]
    fits = [each for each in layouts if not each.refusal]
    if machine.cards:
        costs = card_costs(arguments, profile, spec, item_bytes, fits, given)
    else:
        costs = cpu_costs(profile, machine, fits)
    for each in fits:
        estimate(each, spec, profiles[each.pipeline], costs, load)
    take, why = choose(layouts)
    folder = Path(arguments.model)
    return Plan(
        model=folder.name if (folder / "config.json").is_file() else profile.name, device=costs.device,
        places=machine.places, memory_bytes=machine.memory, load=load, layouts=layouts,
        take=take.name if take else None, why=why, costs=costs,
    )  # fmt: skip


def profile_of(model: str, settings: list[str], pipeline: int = 1) -> Profile:
    """Return the profile named `model`, or the one that `LLM` makes of a Hugging Face folder. Raises ConfigError.

    `LLM` runs more requests at a time with more stages.
    """
    if not Path(model, "config.json").is_file():
        return load_profile(model, settings)
    if settings:
        raise ConfigError(f"--set changes keys of a profile; {model} is a model's folder")
    return make_profile(model, load_format="dummy", pipeline_parallel_size=pipeline)


def machine_of(arguments: argparse.Namespace, profile: Profile, given: bool) -> Machine:
    """Return the places here, or those that the options name. Raises ConfigError."""
    device, mib = profile.parallel.device, profile.memory.device_mib
    memory = round(arguments.memory * _GIB) if arguments.memory else None
    if given:
        if memory is None:
            raise ConfigError("--gbps and --tflops describe cards that are not here: add --memory GIB")
        return Machine(places=arguments.cards or 1, cards=True, memory=memory, shared=False, granule=_HANDLE_BYTES)
    cards = [] if device == "cpu" or (device == "auto" and mib is not None) else cards_here()
    if cards:
        least = memory or min(cards)
        places = arguments.cards or len(cards)
        return Machine(places=places, cards=True, memory=least, shared=False, granule=_HANDLE_BYTES)
    cores = len(os.sched_getaffinity(0))
    own = memory or (mib << 20 if mib is not None else None)
    return Machine(
        places=arguments.cards or cores, cards=False, memory=own or system_memory().total, shared=own is None,
        cores=cores,
    )  # fmt: skip


def cards_here() -> list[int]:
    """Return the bytes of each card that torch sees, asked for in a process of its own."""
    code = "import torch; print(*(torch.cuda.mem_get_info(k)[1] for k in range(torch.cuda.device_count())))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return [int(word) for word in ran.stdout.split()] if not ran.returncode else []


def item_bytes_of(profile: Profile, spec: ModelSpec, cards: bool) -> int:
    """Return the bytes of a weight: a CPU computes half precision in float32 unless the profile names it."""
    name: str = profile.model.dtype
    if name == "auto":
        name = spec.dtype if cards or spec.dtype == "float64" else "float32"
    return {"float64": 8, "float32": 4}.get(name, 2)


def cpu_costs(profile: Profile, machine: Machine, fits: list[Layout]) -> Costs:
    """Return the costs of this machine's CPU, measured now."""
    shares = sorted({(each.tensor, each.threads) for each in fits})
    with tempfile.TemporaryDirectory() as folder:
        write_small(Path(folder))
        wanted = Wanted(
            model=profile.model.path, dtype=profile.model.dtype, block_size=profile.memory.block_size,
            chunk=profile.scheduler.max_num_batched_tokens, cores=machine.cores, shares=shares or [(1, 1)],
            small=folder,
        )  # fmt: skip
        made = measured_costs(wanted)
        return msgspec.structs.replace(made.costs, host=measured_host(Path(folder), made.small))


def card_costs(
    arguments: argparse.Namespace, profile: Profile, spec: ModelSpec, item_bytes: int, fits: list[Layout], given: bool
) -> Costs:
    """Return the costs of cards: by the options, or by a copy and one of its products on the card that is here."""
    if given:
        here = Rates(
            device="cards of the given rates", item_bytes=item_bytes, copy_gbps=arguments.gbps,
            product_tflops=arguments.tflops,
        )  # fmt: skip
    else:
        here = measured(
            profile, spec, 1, (profile.scheduler.max_num_batched_tokens, spec.hidden_size, spec.intermediate_size)
        )
    rates = GivenRates(
        gbps=here.copy_gbps, tflops=here.product_tflops, hop_us=arguments.hop_us, reduce_us=arguments.reduce_us,
        link_gbps=arguments.link_gbps, step_us=arguments.step_us, layer_us=arguments.layer_us,
    )  # fmt: skip
    return costs_of_rates(spec, rates, item_bytes, sorted({each.tensor for each in fits}), here.device)


def text(plan: Plan) -> list[str]:
    """Return the plan as lines of at most 100 columns; refusals may be longer."""
    load = plan.load
    lines = [
        f"{plan.model} on {plan.device}, at most {plan.places} places; {load.requests} requests of {load.input} tokens "
        f"in, {load.output} out",
        "pipeline x   weights of   blocks   requests     output    one request",
        "  tensor       a place             at once    tokens/s     tokens/s",
    ]
    fits = [each for each in plan.layouts if not each.refusal]
    for each in fits:
        weights = size_text(max(each.weights_bytes))
        lines.append(
            f"{each.name:>8}{weights:>14}{each.blocks:>10}{each.at_once:>11}{each.tokens_s or 0:>12,.1f}"
            f"{each.single_tokens_s or 0:>13,.1f}"
        )
    lines += [f"{each.name:>8}  no: {each.refusal}" for each in plan.layouts if each.refusal]
    lines.append(f"take {plan.take}: {plan.why}" if plan.take else plan.why)
    return lines


if __name__ == "__main__":
    sys.exit(run(main))
