"""Sections of the legend for the main screen; other screens share some of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ppconsole.model.request_fields import FIELDS
from ppconsole.view import kvmap, marks, timeline


class Section(NamedTuple):
    """Rows of a legend under a title. `styles`: of the rows whose text has a colour on the screen."""

    title: str
    rows: Mapping[str, str]
    styles: Mapping[str, str] = MappingProxyType({})


BANNER = Section("BANNER", {
    "SERVING": "normal state of the engine", "LOADING": "stages load", "PAUSED": "pause is in effect",
    "DRAINING": "new requests are refused, the others finish", "RESIZING": "a memory change is under way",
    "DEGRADED": "a stage is lost; requests wait", "STOPPED": "the engine ends",
    "STUCK STUCK?": "a stage or the core is stuck: d shows the cause; ? if it is not known",
    "SLOW": "a stage is slower than its own past", "FAULT": "another fault, or one healed seconds ago",
    "ENDED": "the engine has ended; the second line has time, reason and author",
    "REPLAY": "position in a past, minutes of all, speed",
    "from to": "change of figures from an earlier mark, or to a later one",
    "last fault": "the newest incident, for an hour after it: I lists them",
    "healed": "the fault is over, and how long it lasted", "+1": "one more fault, operation or cordon",
    "slo": "share of requests of 5 min that met the objectives of the profile; - none has ended",
    "peak": "most output tokens a second in the last two minutes",
    "CORDON": "cordoned stages: no request begins", "LEASE": "the key whose control lease refuses others' verbs",
    "live": "state of the link and age of the newest sample",
    "waiting above 100": "a figure that is past its threshold in config.toml",
    "RO RW": "read-only console, or one that may send verbs", "VIEWER": "the key of this console may not send verbs",
    "util": "memory utilization: share of each device",
    "r7": "revision of the memory utilization", "step": "number of the newest scheduled step",
    "tok/s": "output tokens a second; the window follows", "ops": "operations under way",
    "consoles": "consoles attached",
    "up": "time since the start", "pp tp": "pipeline stages, and tensor ranks of a stage",
    "epoch": "run of the engine; a restart begins another",
})  # fmt: skip
STAGE_STATES = Section("STATE OF A STAGE  column STATE, or S if it is narrow", {
    "L": "loading: loads weights", "I": "idle: no step to run", "R": "receiving: takes hidden states",
    "C": "computing: runs its layers", "T": "sending: transmits to the next stage", "W": "swapping: moves KV blocks",
    "Z": "resizing: maps or unmaps the KV cache",
    "G": "gathering: waits for another rank of the stage",
    "B": "blocked: the next stage does not receive", "S": "starved: the stage before does not send",
    "H": "stopped: halted by a signal", "D": "dead: no process", "X": "faulty: the root of a fault",
}, {mark.text: mark.style for mark in (*marks.STAGE.values(), marks.FAULT)})  # fmt: skip
MARKS = Section("MARKS", {
    ">": "the selected row", "!": "the root of a fault", "~": "the sample is older than 2 s",
    marks.CORDONED: "cordoned: no request begins", "*": "this stage sets the number of blocks",
    "?": "unknown", "-": "nothing", "m412": "micro-batch (step) 412", "…412": "a micro-batch whose number ends in 412",
}, {"!": "bad", "~": "warn", marks.CORDONED: "warn"})  # fmt: skip
STAGES = Section("STAGES", {
    "STG": "stage; 1.2 is tensor rank 2 of stage 1, which u opens and folds",
    "1×2": "both ranks of stage 1 in one row: state of the worst, memory of the fullest, blocks of the smallest",
    "1.0+1": "the same, while rank 0 is faulty or has halted: its state, and 1 more rank",
    "STATE S": "state, or its letter if it is narrow; see below",
    "MEMORY": "device memory from 0 to its total, see below", "USED": "memory in use, share of the total",
    "KV-USE/MAP/CAP": "KV blocks in use, mapped, and the most that this stage can hold",
    "SWAP": "swap blocks in use on the host", "I>O": "steps not begun > sends not done",
    "MB": "micro-batch in the stage", "STEP": "own work of a step, median of 10 s",
    "P99": "own work of a step, 99th percentile", "IDLE": "share of time spent waiting for others",
    "RANKW": "share of the last second spent waiting for ranks of its stage; the rank with the least comes late",
    "STREAM:OP": "longest open operation and its stream; <1 from stage 1, >2 to stage 2",
    "LAYERS": "layers of the stage, first-last", "PID": "process id", "HOST": "host of the process",
    "DEVICE": "device of the stage", "AGE": "time since the last progress",
})  # fmt: skip
OPERATIONS = Section("OPERATION  column STREAM:OP", {
    "main:": "stream of the step loop; left out if it is narrow",
    "step": "takes up or retires a step, between its operations", "on_device": "work of the device for a step",
    "idle": "waits for a step from the core", "recv": "waits to receive hidden states",
    "embed": "computes the embedding of tokens", "fwd": "computes its layers",
    "head": "computes the output head", "mask": "waits for masks of the grammar process",
    "sample": "samples tokens", "send": "hands a message to the next stage",
    "room": "waits until the next stage takes earlier messages", "token": "waits for sampled tokens of the last stage",
    "out": "swaps KV blocks out to the host", "in": "swaps KV blocks in from the host", "copy": "moves KV blocks",
    "map": "maps or unmaps memory", "coll": "waits for a neighbour to meet it",
    "reduce": "all-reduce: waits for the partial sums of other ranks of its stage",
    "gather": "all-gather: waits for the columns of other ranks of its stage",
    "gpu": "waits for its GPU, or the GPU works", "load": "loads weights",
    "<1 >2": "from stage 1, to stage 2", "<1.0": "for rank 0 of stage 1", "m412": "of micro-batch (step) 412",
})  # fmt: skip
MEMORY_BAR = Section("MEMORY BAR", {
    "█": "in use", "▒": "mapped for the KV cache, free", "·": "not in use", "│": "limit: total × utilization",
}, {"█": "bar.used", "▒": "bar.free", "·": "bar.room", "│": "bar.limit"})  # fmt: skip
POOL = Section("POOL", {
    "cached": "KV blocks that hold a prefix and can be reused", "free": "KV blocks that hold nothing",
    "wait run swap held load": "requests by state", "find fetch": "the same, while there are some",
    "fly": "micro-batches in flight",
    "preempted": "preemptions since the start",
    "p50 p90 p99": "median, 90th and 99th percentile of all requests in 5 min; if it is wide",
})  # fmt: skip
LATENCIES = {
    "QUEUE": "until it first got blocks", "TTFT": "until its first token", "ITL": "mean time between its tokens",
    "ITL99": "99th percentile of the time between its tokens",
}  # fmt: skip
REQUESTS = Section("REQUESTS", {
    "REQ": "request id; the head shows how many, or shown/all with a filter", "OWNER": "user who submitted it",
    "STATE": "state, shortened if it is narrow; see below",
    "AGE": "time since it was submitted", "IN": "prompt tokens", "OUT": "output tokens",
    "BLK": "KV blocks on the device: the same number on every stage", "SWP": "swap blocks on the host",
    **LATENCIES,
    "FILL": "computed share of its prompt and its output so far", "HIT": "prompt tokens from the prefix cache",
    "PRE": "preemptions",
    "WHY": "why it waits; while it runs, its micro-batch and the stage that has it; for 5 s, how it ended",
    "+1": "behind WHY: one more of its steps is in flight",
    "* »": "in front of a row: marked, marked and selected; verbs act on all that are marked",
    "3 marked": "number of marked requests, with those that the filter hides",
    "1-10/19": "rows in view, of all rows of the table; if not all fit",
    "▲ ▼": "sorted by this column: smallest, largest first; beside WHY if there is no room for the column",
})  # fmt: skip
FILTER = Section("FILTER  words after / and --filter; all must hold", {
    "alice": "in the id or the owner", "state:wait": "the text begins so; state=waiting: is it",
    "blk>40 age>=5m": "figures: : = != > >= < <=, with units k m g, ms s m h d, %",
    "!word": "must not hold", '"a b"': "quotes keep spaces and signs",
    **{field.name: field.help for field in FIELDS.values()},
})  # fmt: skip
REQUEST_STATES = Section("STATE OF A REQUEST  column STATE", {
    "wait": "waiting: for blocks or a slot", "run": "running", "swap": "swapped: its blocks are on the host",
    "held": "held: until an operator releases it",
    "load": "loading: its blocks are being copied in from the host",
    "find": "finding: its chunks are looked for in backends", "fetch": "fetching: its chunks are read from a backend",
    "done": "finished",
}, {mark.text: mark.style for mark in marks.REQUEST.values()})  # fmt: skip
TIMELINE = Section("TIMELINE  a row a stage, time to the right", {
    "0-9": "computes a micro-batch: the last digit of its number", "<": "waits to receive", ">": "sends, or waits to",
    "e": "embeds tokens", "h": "computes the head", "s": "samples", "t": "waits for sampled tokens",
    "o": "swaps out", "n": "swaps in", "x": "copies blocks", "z": "maps memory", "c": "collective", "L": "loads",
    "r": "waits for other ranks of its stage, in its layers",
    timeline.IDLE: "idle", "empty": "older than the oldest operation that is kept",
    timeline.KEYS: "keys: less time, more time; the scale changes by these alone",
}, dict(timeline.KINDS.values()))  # fmt: skip
KV_MAP = Section("KV MAP  a cell is one block or more", {
    "■": "used by one request", "▓": "shared by several requests", "░": "cached: kept for a prefix", "·": "free",
    "×": "reserved", "█": "of the selected request",
    "host": "slots of the host, with KV tiers: swapped, cached, moving, free",
}, dict((*kvmap.GLYPHS.values(), kvmap.SELECTED)))  # fmt: skip
TRENDS = Section("TRENDS  time to the right, now at the right edge", {
    "tok/s out": "output tokens a second", "waiting": "requests that wait", "running": "requests that run",
    "KV use": "used share of the mapped KV blocks, from 0 to 100 %", "preempt/s": "preemptions a second",
    "swaps/s": "requests swapped out to the host, a second",
    "TTFT p99": "99th percentile of the time to first token, of the last 5 min",
    "memory": "used share of the memory limit, of the fullest stage, from 0 to 100 %",
    "SCALE": "end of the scale: 100 %, or the maximum shown; it begins at 0", "▁ █": "0, and the end of the scale",
    "last": "time span: 1, 5, 15 or 60 min", "!": "past its threshold in config.toml",
})  # fmt: skip
LINES = Section("LINES", {
    "LOG": "newest events",
    "●": "an event; in the colour of work: something is done",
    "E W": "an error, a warning", "WARN": "newest warnings and errors, by W; ERR: errors",
    "OUT": "the followed request: its prompt behind ›, the end of its text",
    "PROMPT": "the line to type in: a prompt, FILTER or COMMAND",
})  # fmt: skip
STREAMS = Section("STREAMS", {
    "STG": "stage", "STREAM": "stream of a device, or a thread that works",
    "OWNER": "thread that submits to it", "OPERATION": "open operation; ! for more than 2 s",
    "AGE": "time since the operation began", "PEND": "operations submitted and not done",
    "WAITS-FOR": "the event, stage or rank that it waits for",
})  # fmt: skip
