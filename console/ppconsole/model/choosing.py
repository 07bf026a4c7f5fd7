"""The requests of a verb: named by their ids, or chosen by owner, age, state and filter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click
from ppengine.protocol.verb_table import Argument

if TYPE_CHECKING:
    from ppengine.protocol.snapshot import RequestInfo, Snapshot

STATES = ("waiting", "running", "swapped", "held", "loading", "finding", "fetching")
ARGUMENTS = (
    Argument("owner", option="--owner", metavar="NAME", help="All requests of this owner."),
    Argument("older", option="--older", metavar="AGE", help="All that are older: 90, 5m, 2h."),
    Argument("state", option="--state", choices=STATES, help="All in this state."),
    Argument("wanted", option="--filter", metavar="FILTER", help="All that it matches: 'state:wait blk>40'."),
)
"""Options that choose requests; all of them must hold."""
_GIVE = "give ids, or --owner, --older, --state and --filter."


class Choice(NamedTuple):
    """How the requests of a verb were chosen: by a filter, or by marks; otherwise they were named."""

    filter: str = ""
    """A filter that matched them; empty: none."""
    before: str = ""
    """Words before `requests`: `marked `, `waiting `."""
    after: str = ""
    """Words behind it: ` of alice`, ` that match blk>40`."""

    def words(self, count: int) -> str:
        """Return the selection in words: `19 requests of alice`, `3 marked requests`."""
        return f"{count} {self.before}request{'' if count == 1 else 's'}{self.after}"


NAMED, MARKED = Choice(), Choice(before="marked ")


def take(values: dict[str, Any]) -> tuple[list[str], Choice]:
    """Take the words that choose requests out of `values`; return the ids, and the choice by a filter if there is one.

    Raises click.UsageError if there are both.
    """
    ids, choice = list(dict.fromkeys(values.pop("requests"))), _by_filter(values)
    if ids and choice.filter:
        raise click.UsageError(f"requests are named and chosen by options, too; {_GIVE}")
    return ids, choice


def nothing() -> click.UsageError:
    """Return the refusal of a verb without a request."""
    return click.UsageError(f"no request is named or chosen; {_GIVE}")


def _by_filter(values: dict[str, Any]) -> Choice:
    """Take the options out of `values`; return the filter that they make, and the choice in words."""
    from ppconsole.model.filters import quoted

    owner, older, state, wanted = (values.pop(argument.name) for argument in ARGUMENTS)
    words = [f"owner={quoted(owner)}"] if owner is not None else []
    words += [f"age>{older}"] if older is not None else []
    words += [f"state={state}"] if state is not None else []
    text = " ".join([*words, *([wanted] if wanted else [])])
    after = f" of {owner}" if owner is not None else ""
    after += f" older than {older}" if older is not None else ""
    after += f" that match {wanted}" if wanted else ""
    return Choice(text, f"{state} " if state is not None else "", after)


def matching(snapshot: Snapshot, text: str) -> list[RequestInfo]:
    """Return the live requests that a filter matches. Raises FilterError; LookupError if there are none."""
    found = live_matches(snapshot, text)
    if not found:
        raise LookupError(f"no request matches {text}; {snapshot.requests_total} are here")
    return found


def live_matches(snapshot: Snapshot, text: str) -> list[RequestInfo]:
    """Return the live requests that a filter matches, none or more. Raises FilterError."""
    from ppconsole.model.request_fields import request_filter

    wanted = request_filter(text)
    return [request for request in snapshot.requests if request.state != "finished" and wanted.matches(request)]


def unlisted(snapshot: Snapshot) -> str:
    """Return how many requests a filter sees, if those are not all; otherwise nothing."""
    listed, total = len(snapshot.requests), snapshot.requests_total
    return f"the filter sees the first {listed} of {total} requests" if total > listed else ""
