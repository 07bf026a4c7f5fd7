"""Load of an engine that has no fault: requests that wait, their cause, and the users they are of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ppengine.protocol.clients import ClientInfo, limits_text
from ppengine.protocol.snapshot import Queues, RequestInfo, Snapshot

from ppconsole.model.safe import clean

_MANY = 8
"""Requests from which on their user is named, if half of all or more are theirs."""
_FULL = 0.9
"""Share of the KV blocks in use from which on the cache counts as full."""
_STORM_S = 1.0
"""Calls a second without a known API key from which on they are named."""
_NO_KEY = "(no key)"
_ANY = "http"
"""Name of all clients of a port without keys."""


def pressure_lines(snapshot: Snapshot, named: str = "") -> list[str]:
    """Return a line for each load that makes users wait or be refused, with a command that helps; empty: there is none.

    `named`: option that names the engine in commands, with a space behind. The text is safe to print.
    """
    found = [*_waiting(snapshot), *_masks(snapshot), *_refusals(snapshot)]
    return [clean(line.replace(": ppconsole ", f": ppconsole {named}")) for line in found]


def _waiting(snapshot: Snapshot) -> Iterator[str]:
    queues = snapshot.queues
    if not (waits := _waits(queues)):
        return
    yield f"{waits} of {snapshot.requests_total} requests wait: {_cause(snapshot)}"
    users = Counter(map(_user, snapshot.requests))
    name, count = users.most_common(1)[0] if users else ("", 0)
    if count < _MANY or 2 * count < len(snapshot.requests) or name == _ANY:
        return
    theirs = [request for request in snapshot.requests if _user(request) == name]
    tokens = sum(request.prompt_tokens for request in theirs)
    of = f"{count} of {len(snapshot.requests)} requests, with {tokens} prompt tokens, are of {name or 'one user'}"
    yield f"{of}; {_relief(name, theirs)}"


def _user(request: RequestInfo) -> str:
    """Return the API key of a request, or its owner: of a port without keys, the `user` of its call."""
    return request.owner if request.client in ("", _ANY) else request.client


def _waits(queues: Queues) -> int:
    return queues.waiting + queues.swapped


def _cause(snapshot: Snapshot) -> str:
    """Return why the first request waits."""
    queues, most = snapshot.queues, snapshot.engine.max_num_seqs
    if most and queues.running >= most:
        return f"{queues.running} run, max_num_seqs is {most}"
    stage = next((each for each in snapshot.stages if each.kv_blocks.binding), None)
    blocks = None if stage is None else stage.kv_blocks
    if blocks is not None and blocks.mapped and (blocks.used or 0) >= _FULL * blocks.mapped:
        preempted = f", {snapshot.preemptions_total} preemptions since the start" if snapshot.preemptions_total else ""
        return f"{blocks.used} of {blocks.mapped} KV blocks are in use{preempted}"
    # Those behind another one repeat its reason.
    whys = (request.why.text.partition("; behind ")[0] for request in _of_state(snapshot) if request.why is not None)
    return next(filter(None, whys), "no reason is given")


def _of_state(snapshot: Snapshot) -> Iterator[RequestInfo]:
    return (request for request in snapshot.requests if request.state in ("waiting", "swapped"))


def _relief(name: str, theirs: list[RequestInfo]) -> str:
    """Return the commands that let other users pass and bound this one."""
    owner, is_key = theirs[0].owner, name == theirs[0].client
    if any(request.owner != owner for request in theirs) or not _plain(owner):
        return f"try: ppconsole limit {name} {_MANY}" if is_key and _plain(name) else "see: ppconsole status"
    first = f"others first: ppconsole priority --owner {owner} 10"
    return f"{first}; fewer: ppconsole limit {name} {_MANY}" if is_key and _plain(name) else first


def _plain(name: str) -> bool:
    """Return whether a shell takes a name as it is written."""
    return bool(name) and name[0] != "-" and all(letter.isalnum() or letter in "._-@" for letter in name)


def _masks(snapshot: Snapshot) -> Iterator[str]:
    """Yield the users whose grammars are slow; one request may be seen between two tokens."""
    waits = Counter(
        _user(request) for request in snapshot.requests if request.why is not None and request.why.code == "mask"
    )
    if waits.total() >= 2:
        users = ", ".join(f"{name or 'one user'} {count}" for name, count in waits.most_common(3))
        yield f"{waits.total()} requests wait for masks of their grammars ({users}); the others go on"


def _refusals(snapshot: Snapshot) -> Iterator[str]:
    """Yield calls that are refused, while some come. Without a limit they may be long past, unless requests wait."""
    waits = _waits(snapshot.queues) > 0
    for each in snapshot.clients:
        rate = each.requests_s or 0.0
        if each.key == _NO_KEY and rate >= _STORM_S:
            yield f"{rate:.0f} calls a second to {each.route} have no known API key; their answer is 401"
        elif each.key != _NO_KEY and each.refused_total and rate > 0:
            rule = _rule(each)
            if rule or waits:
                why = rule or "the key has no limit"
                yield f"{each.refused_total} answers 429 or 503 to {each.key} on {each.route} since the start; {why}"


def _rule(client: ClientInfo) -> str:
    """Return the limits of a key, and the command that ends them; empty: it has none."""
    limit = limits_text(client.most_open, client.per_minute, draining=client.draining)
    rule = " and ".join(filter(None, [limit, "" if client.key_limit is None else "in the file of keys"]))
    ends = f"; end it: ppconsole limit {client.key} off" if limit and _plain(client.key) else ""
    return f"limit {rule}{ends}" if rule else ""
