"""Sections of the legend for all screens but the main one, and for the output of commands."""

from __future__ import annotations

from ppconsole.model.request_fields import FINISHED_FIELDS
from ppconsole.view import tier_bars
from ppconsole.view.legend_main import LATENCIES, Section

STAGE_FIELDS = Section("STATE", {
    "operation": "longest open operation and its stream", "waits for": "the peer that it waits for, and for how long",
    "cordon": "operator who cordoned the stage, and the reason", "process": "pid and host", "device": "kind and name",
    "layers": "first to last layer", "micro-batches": "steps in the stage", "sample age": "age of these figures",
    "progress age": "time since the last progress", "step p50 p99": "own work of a step: median, 99th percentile",
    "idle": "share of time spent waiting for others", "inbox": "steps received and not begun",
    "outbox": "sends not done",
    "RANK": "tensor rank of the stage: a process of its own",
    "rank wait": "RANKW: share of time spent waiting for ranks of its stage", "state": "see the letters below",
})  # fmt: skip
STAGE_REQUESTS = Section("REQUESTS BY BLOCKS", {
    "BLK": "KV blocks: a block spans all layers, so a request holds the same number on every stage",
    "HERE": "bytes of them on this stage", "REQ": "request id",
})  # fmt: skip
MEMORY = Section("MEMORY", {
    "total": "memory of the device", "limit": "total × utilization", "used": "held by this stage on the device",
    "weights": "parameters of the layers", "kv mapped": "KV cache backed by memory",
    "kv reserved": "address space for the KV cache", "kv resident": "KV cache resident in RAM; CPU stages",
    "other": "workspace and libraries", "kv blocks": "device blocks by use; see the pool's words",
    "host blocks": "swap blocks on the host",
})  # fmt: skip
GPU = Section("GPU  the whole card, other processes included", {
    "memory": "in use and total", "busy": "share of time with a kernel running", "SM clock": "clock of the cores",
    "power": "drawn and its limit", "temperature": "of the card",
    "ECC errors": "memory errors that were corrected, and that were not",
    "PCIe": "bytes a second to and from the host", "NVLink": "bytes a second to and from other cards",
    "figures' age": "age of these figures", "held down by": "reasons why the clock is throttled",
    "on the card": "process with its memory and its share of the SMs; yellow: not of this engine",
    "XID": "error code of NVIDIA's driver", "no answer": "NVML does not answer",
})  # fmt: skip
REQUEST_FIELDS = Section("STATE AND COUNTS", {
    "state": "waiting, finding, fetching, running, swapped, held, loading or finished", "why": "why it does not run",
    "steps": "its steps in flight", "owner": "user who submitted it", "client": "API key with which it came",
    "revision": "changes by verbs; guards --if-rev",
    "prompt": "prompt tokens", "output": "output tokens, and the most", "computed": "tokens in the KV cache",
    "prefix hit": "prompt tokens from the prefix cache",
    "came from": "tokens of its last start by their source, with KV tiers",
    "preemptions": "times its blocks were taken",
    "swaps": "times it was swapped out",
    "sampling": "T temperature, p top-p, k top-k, or greedy; adjusted: penalties, min-p, bias, bad or allowed tokens",
    "bad words": "texts that its output must not have",
    "seed": "seed of the sampling", "priority": "the smaller starts first of those that wait",
    "blocks": "KV blocks on the device",
})  # fmt: skip
REQUEST_TIMES = Section("TIMING", {
    "age": "since it was submitted", "prepared": "until it was queued", "queued": "from there until it first ran",
    "first token": "until the first output token",
    "between": "mean time between output tokens",
    "itl p50 p99": "time between output tokens: median, 99th percentile; at most 2.2 % off",
    "finished": "until the last output token",
    "ended": "time of its end", "the rest": "tokens and text, which the engine has forgotten",
})  # fmt: skip
REQUEST_BLOCKS = Section("BLOCKS AND TEXT", {
    "BLOCK TABLE": "numbers of its KV blocks in order; the first of each row is counted in front",
    "°": "block shared with another request", "host blocks": "numbers of its swap blocks",
    "prompt ids": "token ids of the prompt", "output ids": "token ids of the output",
    "PROMPT": "its text, clipped", "OUTPUT": "text so far; Y copies it",
    "HISTORY": "its states with their times", "TOKENS": "token ids of prompt and output",
})  # fmt: skip
DIAGNOSIS = Section("DIAGNOSIS", {
    "do": "the suggested fix", "ROOT": "the stage that causes the fault; double frame", "WHY": "evidence",
    "PIPELINE": "the stages in order; an arrow points from a waiting stage to the one that it waits for",
    "──►": "waits for the stage to the right", "◄──": "waits for the stage to the left",
    "◄─►": "each waits for the other",
    "STACKS": "call stacks; t takes them again", "core": "the engine core: scheduler and requests",
})  # fmt: skip
STEPS = Section("LAST STEPS  a row a step, a column a stage", {
    "STEP": "number of the step", "began": "newest step that the stage began",
    "finished": "newest step that it finished", "retired": "newest step that it acknowledged to the core",
    "R": "retired: own work", "F": "finished, not retired: own work", "+": "time waited inside the step",
    "B": "begun: time in the open operation", "<.1": "for rank 1 of its stage", "·": "not begun",
    "-": "no longer recorded",
})  # fmt: skip
CHECKS = Section("LIVE CHECKS AND FINDINGS", {
    "ledger": "order of hand-offs between streams and threads", "strict": "waits for each operation before the next",
    "finite": "looks for NaN and infinity where values leave a stage",
    "shadow": "repeats some steps on a single-stage reference",
    "checksum": "compares hidden states with the checksum that their message carries",
    "to fix": "the change that would order the accesses",
})  # fmt: skip
LEDGER = Section("LEDGER", {
    "FOR": "purpose and device of the stream", "PRODUCER CONSUMER": "streams that hand over and take",
    "ORDERED-BY": "the event or wait that orders the hand-off", "TIMES": "how often",
    "BUFFER": "name of the buffer", "GEN": "generation: how often it was reused", "SIZE": "bytes",
    "LAST-WRITER": "stream and operation that wrote it last", "READ-NOW-BY": "streams that read it now",
})  # fmt: skip
CHANGES = Section("SINCE THE MARK  in a past with a mark", {
    "THEN NOW": "figures at the earlier and at the later of mark and moment in view", "CHANGE": "their difference",
    "EVENTS BETWEEN": "events after the earlier one, up to the later one",
    "util": "memory utilization", "step": "number of the newest step",
})  # fmt: skip
EVENTS = Section("EVENTS", {
    "E W ●": "error, warning, information", "#17": "number of the event",
    "op.": "an operation, as op.applied", "request.": "a request, as request.finished",
    "stage.": "a stage, as stage.dead", "verdict.": "a verdict raised or cleared", "link.": "this console's link",
    "step": "the step at which it took effect",
})  # fmt: skip
STACKS = Section("STACKS", {
    "stages 0, 1": "these stages have the same frames", "core": "the engine core", "MainThread": "the step loop",
    "holds the GIL": "the thread that runs Python code", "note": "how the stacks were taken",
})  # fmt: skip
LOGS = Section("LOGS", {
    "a fault's colour": "a line with an error or a traceback", "a warning's colour": "a line with a warning",
}, {"a fault's colour": "bad", "a warning's colour": "warn"})  # fmt: skip
CONFIRM = Section("CONFIRM", {
    "effect": "effect of the verb", "target": "the request, stage or engine", "now": "the present state of the target",
    "epoch": "run of the engine that the plan is for", "revision": "the verb is refused if this has changed",
    "note": "requests of the verb that are not in the table", "plan 4s old": "age of the plan; it is renewed by itself",
    "since match": "requests that match the filter since the dialog opened; they are not in the plan",
    "plan": "the engine's answer to a dry run", "shell": "the shell line that does the same",
    "CONFLICT": "the target has changed since the plan",
    "not": "a request to which the verb does not apply; Do the other 2 goes on without it",
})  # fmt: skip
MEMORY_DIALOG = Section("MEMORY UTILIZATION", {
    "util": "share of each device's memory: above 0, at most 1", "revision": "counts changes of the utilization",
    "-20% +5%": "change by a share of the present KV memory", "-2GiB": "change by bytes on each device",
    "0 █▒·│": "stage and its memory bar",
})  # fmt: skip
CLI_STATUS = Section("STAGES", {
    "STG": "stage, or 1.0 for a tensor rank of it", "STATE": "state of the stage",
    "HOST": "host of the stage, where there are several",
    "MEMORY": "[##|..] device memory: # in use, | limit",
    "USED/LIMIT": "bytes in use and limit", "KV-USE/MAP/CAP": "KV blocks in use, mapped, most that fit",
    "SWAP": "host blocks in use/all", "I>O": "steps not begun > sends not done", "MB": "micro-batches in the stage",
    "STEP": "own work of a step, median", "IDLE": "share of time spent waiting",
    "RANKW": "share of time spent waiting for ranks of its stage", "AGE": "since the last progress",
    "STREAM:OP": "longest open operation and its stream", "POOL": "KV blocks, requests by state, preemptions",
    "SLO": "goodput: share of requests of 5 min that met the objectives of the profile",
    "LATENCY": "median, 90th and 99th percentile of time to first token, between tokens, in the queue and before it",
    "OP o1": "operation under way, and its operator",
})  # fmt: skip
CLI_REQUESTS = Section("REQUESTS", {
    "REQ": "request id", "OWNER": "user", "STATE": "state", "AGE": "since it was submitted", "IN": "prompt tokens",
    "OUT": "output tokens", "BLK": "KV blocks", "SWP": "swap blocks", "REV": "revision, for --if-rev",
    "WHY": "why it does not run, or where its step is",
})  # fmt: skip
FINISHED = Section("FINISHED  requests that have ended, the newest first", {
    "REQ": "request id", "OWNER": "user who submitted it", "ENDED": "time since its end",
    "TOOK": "from its arrival to the end", "IN OUT": "prompt and output tokens",
    **LATENCIES, "PRE": "preemptions", "REASON": "finish reason; also a field of --filter, as all of these",
    "▲ ▼": "sorted by this column: smallest, largest first",
    "p50 p90 p99": "median, 90th and 99th percentile of all requests in 5 min; in the console",
    "from the record": "in a past: the engine's history has no requests that ended before",
})  # fmt: skip
FINISHED_FILTER = Section("FILTER  words after / and --filter; all must hold", {
    "alice": "in the id or the owner", "ttft>1s ended<5m": "figures: : = != > >= < <=, with units",
    "!reason:abort": "must not hold", **{field.name: field.help for field in FINISHED_FIELDS.values()},
})  # fmt: skip
OPTIONS = Section("OPTIONS OF PROMPTS", {
    "OPTION": "an option of submit, without its dashes", "VALUE": "value that prompts are sent with",
    "DEFAULT": "value after set NAME default", "MEANING": "effect of the option", "*": "differs from its default",
})  # fmt: skip
CLI_ENGINES = Section("ENGINES", {
    "ID": "id for -e", "NAME": "name for -e", "STATE": "state, or no answer", "MODEL": "model",
    "STAGES": "pipeline stages", "PID": "pid of the supervisor", "UP": "time since the start",
    "ENDED": "end of an engine (--all)", "REASON": "why it ended",
})  # fmt: skip
CLI_STREAMS = Section("STREAMS AND LEDGER", {
    "STG": "stage", "STREAM": "stream", "BEGUN": "newest step begun", "DONE": "newest step done",
    "PEND": "operations not done", "AGE": "since the operation began", "WAITS-FOR": "event, stage or rank",
    "OWNER": "thread that submits", "DEVICE": "device", "FOR": "use of the stream",
    "ALIVE": "no after it was destroyed", "OPERATION": "open operation", "PRODUCER CONSUMER": "streams of a hand-off",
    "ORDERED-BY": "the event that orders it", "TIMES": "how often", "BUFFER": "buffer", "SIZE": "bytes",
    "GEN": "generation", "LAST-WRITER": "stream that wrote it last", "READ-NOW-BY": "streams that read it now",
    "STATE": "free, or nothing while it is used",
})  # fmt: skip

TOPOLOGY = Section("PLACES", {
    "PLACE": "stage, or stage.rank: one process", "!": "the root of a fault",
    "pp tp": "pipeline stages, and tensor ranks of a stage",
    "STATE": "state of the process", "NODE": "host of the process", "PID": "process id", "DEVICE": "its device",
    "LAYERS": "layers of the stage, first-last", "PEERS": "other ranks of its stage: each computes a part of the step",
    "FROM": "place that sends it hidden states", "TO": "place that receives its hidden states",
    "TOKENS": "place whose sampled tokens it receives; on the first stage", "?": "not known", "-": "none",
}, {"!": "bad"})  # fmt: skip
WAYS = Section("MESSAGES", {
    "CARRIES": "content of the messages", "WAY": "how they go, see below", "BETWEEN": "places between which they go",
    "all-reduce": "partial sums of the ranks of a stage", "hidden states": "from a stage to the next",
    "tokens": "sampled tokens, from the last stage to the first",
    "0.0>1.0": "from the first to the second", "0.0=0.1": "both ways", "0.0-3": "each rank of stage 0 with each other",
    "shared memory": "memory of the host; ranks on CPUs", "TCP": "a TCP connection, on loopback or between hosts",
    "RDMA": "network adapters copy them from host to host; the profile has edges: rdma or auto",
    "device memory": "from card to card; between stages TCP if the profile has peer_to_peer: false",
    "?": "the snapshot does not show it",
})  # fmt: skip
SUMS = Section("SUMS OF RANKS", {
    "UP-TO": "largest part of a rank that is summed this way", "WAY": "how; the first way that fits is taken",
    "PART": "size that was summed when the ranks met, and its way; ?: not known, as where ranks share a card",
    "TAKES": "its time, at the slowest place", "GB/S": "bytes of a part by that time",
})  # fmt: skip
LINKS = Section("CARDS  as NVML reports their links", {
    "PLACES": "places on the card", "CARD": "its name", "BUS-ID": "its address on PCIe",
    "PCIE": "generation and lanes of its link; yellow: below what card and slot allow, as of an idle card",
    "NVLINK": "NVLinks that are up, of all; yellow: some are down; -: it has none",
    "LINKS": "the best way to each other card of the engine, or to all of them",
    "NV18": "18 NVLinks to that card, or to the switches on the way",
    "PIX PXB": "one PCIe switch on the way, several", "PHB NODE SYS": "a host bridge, a NUMA node, between NUMA nodes",
})  # fmt: skip

CLIENTS = Section("CLIENTS  of the HTTP port, the busiest first", {
    "KEY": "name of the API key; http without keys; all: the rows together",
    "ROUTE": "end of the path; chat is /v1/chat/completions", "OPEN": "requests whose answer is under way",
    "SLOW": "those of them whose client has not read for 1 s", "REQ/S": "requests a second, of 10 s",
    "TOK/S": "output tokens a second, of 10 s",
    "TTFT": "from the request to its first token: median of 5 min", "TTFT90 TTFT99": "90th and 99th percentile of it",
    "ITL": "between two events of a stream: median of 5 min", "ITL90 ITL99": "90th and 99th percentile of it",
    "LIMIT": "8: most open requests; 60/min, 9k tok/min: most a minute; drain: new ones are refused",
    "ERR": "answers of an error status other than 429 and 503",
    "429": "answers 429 and 503: the engine was full or did not serve, or a limit of the key",
    "LEFT": "requests whose client left before the end", "REQS": "requests, refused ones too; on a wide screen",
    "TOKENS": "output tokens; on a wide screen", "-": "none yet",
})  # fmt: skip

TIERS = Section("TIERS  device, host and backends of KV blocks", {
    "slots": "host blocks: swapped hold requests, cached are found again, moving are written now",
    "quarantined": "slots of a fetch whose store has not answered; not used until it does or is dead",
    "finding fetching": "requests whose chunks are looked for, and read",
    "short fetches": "fetches that brought less than was found", "evicted": "cached slots that were used again",
    "dropped": "blocks not copied out and chunks not written, for lack of slots or time",
    "TIER": "device, host, a backend by its name; removed: tokens of removed ones; computed: tokens that no tier had",
    "STATE": "opening, open, broken, paused, draining: read and not written; unknown: no store answers",
    "USE": "used part: blocks of the fullest stage, slots, bytes of the quota",
    "USED SIZE": "blocks of the device; bytes of all stages on the host and in a backend, and the most",
    "HIT": "share of the prompt tokens of all starts; the column adds up to 100 %", "TOKENS": "their number",
    "IN/S OUT/S": "bytes a second towards the device, and away from it, of 2 s",
    "IN OUT": "the same since the boot; if it is wide", "?": "not known", "-": "none yet",
})  # fmt: skip
TIER_BARS = Section("USE", {
    tier_bars.USED: "used", tier_bars.SWAPPED: "swapped requests", tier_bars.CACHED: "cached",
    tier_bars.MOVING: "moving", tier_bars.FREE: "free",
}, tier_bars.STYLES)  # fmt: skip
BACKENDS = Section("BACKENDS AND STORES", {
    "BACKEND": "name in the profile, or of store add; its newest error is below",
    "R-BREAKER": "of lookups and reads, the worst of all places: closed; open: none after errors; half-open: one tries",
    "W-BREAKER": "the same of writes; a full disk is not written, and read on",
    "R50 R99": "a read of one shard: median and 99th percentile, of the slowest place",
    "W50 W99": "a write of one shard", "QUEUE": "calls that wait or are under way, all places",
    "ERR": "calls that failed or timed out",
    "BAD": "shards with a wrong checksum, length or header; they were deleted, and no token came from them",
    "DECL": "fetches not begun, as computing was predicted to be faster", "EVICT": "shards deleted for the quota",
    "WRITE": "chunks that it gets: always, reused (at the second use), evicted (before their slots are)",
    "KIND URL": "kind and place, without a password",
    "STORE": "store process of a place, stage.rank", "AGE": "of its newest figures; none: it has not come yet",
    "JOBS": "jobs that it owes an answer", "LAG": "age of the oldest of them",
})  # fmt: skip
BACKEND = Section("BACKEND", {
    "state": "see STATE on the Tiers screen",
    "read breaker": "of lookups and reads: closed, open or half-open, the worst of all places",
    "write breaker": "the same of writes",
    "newest error": "of any place, until its next success", "not used": "why backends are not used",
    "place": "its place, without a password", "kind": "kind of backend", "written are": "chunks that it gets",
    "used quota": "bytes of all places, and the most", "hit tokens": "tokens that starts loaded from it",
    "declined": "fetches not begun, as computing was predicted to be faster",
    "read written": "bytes since the boot, and a second", "errors": "calls that failed or timed out",
    "corrupt": "shards with a wrong checksum, length or header", "evicted": "shards deleted for the quota",
    "queue": "calls that wait or are under way",
    "CALLS": "time of a call for one shard: median, 90th and 99th percentile",
    "EVENTS": "events that name it, the newest first",
})  # fmt: skip

INCIDENTS = Section("INCIDENTS", {
    "ID": "number, or engine/number if it is of an earlier engine", "ENGINE": "name of the engine",
    "BEGIN": "begin of the fault", "LASTED": "until it was over; ? if the engine ended in it",
    "STG STAGE": "stage of the root, or core; -: a process or store", "CAUSE": "cause of the root",
    "FAULT": "the root in words",
    "BY": "author of the last command that had an effect during it", "END": "how it ended",
})  # fmt: skip
