"""Commands that the gateway keeps for repeats: their lines in the audit log and their answers."""

from __future__ import annotations

import time
from hashlib import blake2b
from typing import Literal, cast

import msgspec

from ppengine.gateway.audit import Entry, entry_of
from ppengine.protocol.backend_fields import without_secrets
from ppengine.protocol.control import Accepted, Command, Deferred, ErrorCode, Outcome, Refused, Reply
from ppengine.protocol.store_verbs import StoreAdd
from ppengine.protocol.verb_table import ROWS, Row
from ppengine.protocol.verbs import Many, label_of, row_of


class Kept(msgspec.Struct):
    """One command and its answers so far."""

    entry: Entry
    """Its first line in the audit log; without arguments once a command that has a digest has ended."""
    words: str
    """The verb and its short arguments."""
    client: bytes = b""
    command: Command | None = None
    """None: it has ended, or the console of a predecessor's has not repeated it."""
    encoded: Command | None = None
    """The command with the tokens of its texts, for the core; None: it needs none, or they are not there yet."""
    digest: bytes = b""
    """Digest of its verb, for repeats; empty: only the audit log has it."""
    replies: list[Reply] = []
    over: bool = False
    audited: set[str] = set()
    """Outcomes that the predecessor has recorded."""
    recorded: Reply | None = None
    """The end that the predecessor has recorded, as far as its line has it."""
    waits_since: float | None = None
    """Time from which it waits for a core that is restarted."""
    ends: int = 0
    """Cores that ended after they had got it, and before they had answered."""
    forget_at: float | None = None
    """Time until which its console may repeat a command that never reached the core; then it is refused."""

    def take(self, command: Command) -> None:
        """Take the command from its console."""
        self.command, self.digest = command, _digest(command)

    def end(self) -> None:
        """Drop what answers to repeats do not need: the verb, which may have a long prompt, and its arguments."""
        self.command = self.encoded = self.waits_since = self.forget_at = None
        if self.digest:
            self.entry = msgspec.structs.replace(self.entry, args={})

    @property
    def row(self) -> Row:
        """The row of its verb."""
        return ROWS[self.entry.verb]

    @property
    def op(self) -> str:
        """Name of its operation for answers that the gateway gives itself."""
        return f"g-{self.entry.id[-8:]}"

    @property
    def ends_engine(self) -> bool:
        """Whether it is a command to end the engine, and no dry run."""
        return self.row.ends_engine and not self.entry.dry_run


def brief(command: Command) -> str:
    """Return `set-memory 0.6`: the verb and its short arguments, no prompt and no password."""
    row, verb = row_of(command.verb), command.verb
    if row.target == "submission":
        return row.name
    if isinstance(command.verb, Many):
        return f"{label_of(command.verb)} {len(command.verb.verbs)} requests"
    if isinstance(verb, StoreAdd):
        return " ".join(filter(None, [row.words, verb.backend, verb.kind, without_secrets(verb.url)]))
    values = msgspec.structs.astuple(verb)
    words = [value for value in values if value is not None and not isinstance(value, bool)]
    return " ".join([row.words, *(f"{word:g}" if isinstance(word, float) else str(word) for word in words)])


def is_end(reply: Reply) -> bool:
    """Return whether no other answer follows."""
    return isinstance(reply, Outcome | Refused)


def line_of(entry: Entry, reply: Reply) -> Entry:
    """Return the line of an answer."""
    return msgspec.structs.replace(
        entry, wall=time.time(), outcome=outcome_name(reply), text=reply_text(reply),
        code=reply.code if isinstance(reply, Refused) else "", op="" if isinstance(reply, Refused) else reply.op,
    )  # fmt: skip


def repeats(known: Kept, command: Command, principal: str) -> bool:
    """Return whether `command` of `principal` repeats a known one.

    The audit log has verb and arguments of a predecessor's commands.
    """
    if known.entry.principal != principal:
        return False
    if known.digest:
        return (known.entry.by, known.digest) == (command.by, _digest(command))
    first, second = known.entry, entry_of(command, "", principal)
    same_args = msgspec.json.encode(first.args, order="sorted") == msgspec.json.encode(second.args, order="sorted")
    return (first.by, first.verb) == (second.by, second.verb) and same_args


def _digest(command: Command) -> bytes:
    # The order of a dict's keys makes no other command.
    plain = msgspec.to_builtins(command.verb, str_keys=True)
    return blake2b(msgspec.msgpack.encode(plain, order="deterministic"), digest_size=16).digest()


def as_recorded(line: Entry) -> Reply:
    """Return the answer of which an audit log has the line."""
    if line.outcome == "refused":
        text = line.text.removeprefix(f"{line.code}: ")
        return Refused(id=line.id, code=cast(ErrorCode, line.code), text=text)
    state = cast(Literal["applied", "failed", "superseded", "planned"], line.outcome)
    return Outcome(id=line.id, op=line.op, state=state, text=line.text)


def reply_text(reply: Reply) -> str:
    """Return the one line of a reply."""
    if isinstance(reply, Accepted):
        return "; ".join(reply.plan)
    return f"{reply.code}: {reply.text}" if isinstance(reply, Refused) else reply.text


def outcome_name(reply: Reply) -> str:
    """Return the outcome of an answer, as the audit log has it."""
    if isinstance(reply, Outcome):
        return reply.state
    return "accepted" if isinstance(reply, Accepted) else "deferred" if isinstance(reply, Deferred) else "refused"
