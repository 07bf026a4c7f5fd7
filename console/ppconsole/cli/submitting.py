"""`submit` and `follow`: a request's text as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any, TextIO

import click
from ppengine.protocol.verb_table import ROWS

from ppconsole.cli import exits
from ppconsole.cli.aborting import abort, abort_unnamed
from ppconsole.cli.effects import help_of, show_refused
from ppconsole.cli.options import Common, common_options
from ppconsole.cli.session import FirstSnapshot, attached, has_ended, named, print_json, run, say
from ppconsole.model.grammar import parameters

if TYPE_CHECKING:
    from ppengine.protocol.control import Accepted, Deferred, Outcome, Refused
    from ppengine.protocol.verbs import Submit

    from ppconsole.link.engine_link import EngineLink


AGAIN_S = 0.25
"""Seconds until a stream asks a core again that is stopped or away."""
GONE_S = 1.0
"""How often a stream without a link looks whether there is an engine that it could come back to."""


def verb_command(name: str) -> click.Command:
    """Return the command `submit`. Its row gives the options; a prompt may come from stdin."""
    params = parameters(ROWS[name])
    params[0].required = False

    @click.command(name, params=params, help=help_of(ROWS[name]))
    @common_options
    @click.option(
        "--detach", "--no-wait", is_flag=True, help="Print the id once it is accepted, and leave; `follow` picks it up."
    )
    @click.option("--reason", default="", metavar="TEXT", help="Why, for the audit log.")
    @click.option("--dry-run", is_flag=True, help="Say whether it would fit; submit nothing.")
    @click.option("--json-schema", type=click.File(), metavar="FILE", help="The text is JSON of the schema in FILE.")
    @click.option("--regex", metavar="EXPRESSION", help="The text matches this regular expression as a whole.")
    def command(
        common: Common, detach: bool, reason: str, dry_run: bool, json_schema: TextIO | None, regex: str | None,
        **values: Any,
    ) -> int:  # fmt: skip
        verb = _constrained(_submit(values), json_schema, regex)
        return run(lambda: _submit_and_follow(verb, common, detach, reason, dry_run))

    return command


@click.command("follow")
@click.argument("request")
@common_options
def follow_command(request: str, common: Common) -> int:
    """Print the text of REQUEST as it comes.

    REQUEST is an id, a unique beginning of one, or the x-request-id of its HTTP client. The text comes from its
    beginning. Ctrl-C leaves the request alone.
    """

    from ppconsole.link.source import QueryFailed

    async def follow() -> int:
        first = FirstSnapshot(common)
        async with attached(common, first.take, slow=True, passing=True) as link, asyncio.timeout(common.timeout):
            try:
                await link.fetch(request, wait_ms=0)
                found = request
            except QueryFailed as error:
                found = request if error.code != "NOT_FOUND" else named(request, await first.get())
            return await _Stream(link, found, common.json).all_samples()

    return run(follow)


def _prompt(text: str | None) -> str:
    if text == "-" or (text is None and not sys.stdin.isatty()):
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            wrong = f"byte 0x{error.object[error.start]:02x}"
            raise exits.Failure(f"stdin is not UTF-8 at offset {error.start}: {wrong}", exits.USAGE) from None
    if text is None:
        raise exits.Failure("no prompt: give one, or - to read it from stdin", exits.USAGE)
    return text


def _submit(values: dict[str, Any]) -> Submit:
    from ppengine.protocol.verbs import Submit, build

    try:
        verb = build("submit", {**values, "prompt": _prompt(values["prompt"])})
    except ValueError as error:
        raise exits.Failure(str(error), exits.USAGE) from None
    assert isinstance(verb, Submit)
    return verb


def _constrained(verb: Submit, schema: TextIO | None, regex: str | None) -> Submit:
    """Return a submission whose text follows a schema or an expression, where one is given."""
    import msgspec
    from ppengine.protocol.structured_outputs import StructuredOutputsParams

    if schema is None and regex is None:
        return verb
    try:
        form = StructuredOutputsParams(json=None if schema is None else schema.read(), regex=regex)
        sampling = msgspec.structs.replace(verb.sampling, structured_outputs=form)
    except ValueError as error:
        raise exits.Failure(str(error), exits.USAGE) from None
    return msgspec.structs.replace(verb, sampling=sampling)


async def _submit_and_follow(verb: Submit, common: Common, detach: bool, reason: str, dry_run: bool) -> int:
    from ppengine.protocol.control import Outcome, Refused

    from ppconsole.model.safe import clean

    async with attached(common, slow=True, passing=True) as link:
        asked = asyncio.create_task(_answer_in_time(link, verb, common, reason, dry_run))
        try:
            answer = await asyncio.shield(asked)
        except asyncio.CancelledError:
            if not dry_run:
                await abort_unnamed(link, asked)
            raise
        if isinstance(answer, Refused):
            return show_refused(answer, "submit", common)
        if isinstance(answer, Outcome):
            return _show_plan(answer, common)
        if common.json:
            print_json({"id": answer})
        elif detach:
            click.echo(clean(answer))
        else:
            say(f"request {answer}")
        if detach:
            return exits.DONE
        try:
            async with asyncio.timeout(common.timeout):
                return await _Stream(link, answer, common.json, verb.sampling.n).all_samples()
        except TimeoutError:
            text = f"{answer} has not finished within {common.timeout:g} s; it goes on: ppconsole follow {answer}"
            raise exits.Failure(text, exits.TIMEOUT) from None
        except asyncio.CancelledError:
            await abort(link, answer)
            raise


async def _answer_in_time(
    link: EngineLink, verb: Submit, common: Common, reason: str, dry_run: bool
) -> str | Refused | Outcome:
    """Return the answer of `submit` before --timeout is over. Raises LinkLost."""
    from ppconsole.link.source import LinkLost

    try:
        async with asyncio.timeout(common.timeout):
            return await submit(link, verb, reason=reason, dry_run=dry_run)
    except TimeoutError:
        text = f"unknown outcome: no answer within {common.timeout:g} s"
        raise LinkLost(f"{text}; see ppconsole status", sent=True) from None


async def submit(link: EngineLink, verb: Submit, *, reason: str = "", dry_run: bool = False) -> str | Refused | Outcome:
    """Return the id of the request as soon as the engine names it; a Refused; or, of a dry run, its Outcome.

    Raises LinkLost when it is not known whether the engine took it.
    """
    from ppengine.protocol.control import Accepted, Refused

    named: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def progress(step: Accepted | Deferred) -> None:
        if isinstance(step, Accepted) and step.request is not None and not named.done():
            named.set_result(step.request)

    command = asyncio.create_task(link.command(verb, reason=reason, dry_run=dry_run, on_progress=progress))
    waits: list[asyncio.Future[Any]] = [command, named]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if named.done():
            return named.result()
        end = command.result()
    finally:
        command.cancel()
        await asyncio.gather(command, return_exceptions=True)
    if isinstance(end, Refused) or dry_run or end.request is None:
        return end
    return end.request


def _show_plan(outcome: Outcome, common: Common) -> int:
    from ppconsole.model.safe import clean

    if common.json:
        print_json(outcome)
    else:
        click.echo(clean(f"submit {outcome.state}: {outcome.text}"))
        for line in outcome.plan:
            click.echo(f"  {clean(line)}")
    return exits.OF_STATE[outcome.state]


class _Stream:
    """Prints the samples of one request from their beginning; goes on by offset after a lost link.

    Ends with exit code 3 when there is no engine left that could go on.
    """

    def __init__(self, link: EngineLink, request: str, as_json: bool, samples: int | None = None) -> None:
        self._link = link
        self._request = request
        self._json = as_json
        self._samples = samples
        self._prompt_tokens = 0
        self._engine = link.record
        self._came = 0
        self._loss = ""
        """Why it is lost."""

    async def all_samples(self) -> int:
        """Print all samples; one streams as it comes, of several each is printed as text when it has ended."""
        from ppconsole.model.safe import clean

        begun = asyncio.get_running_loop().time()
        several = self._samples is not None and self._samples > 1
        text, reason, samples = await self._sample(0, live=not several)
        ends = [f"{reason}"]
        if samples > 1:
            self._show_sample(0, samples, text, already=not several)
            for index in range(1, samples):
                text, reason, _ = await self._sample(index, live=False)
                ends.append(f"{reason}")
                self._show_sample(index, samples, text, already=False)
        seconds = asyncio.get_running_loop().time() - begun
        # A stream that is followed late comes in one piece: no rate follows from that.
        paced = self._samples is not None and seconds > 0
        pace = f" in {seconds:.2f} s, {self._came / seconds:.0f} tok/s" if paced else ""
        why = clean(", ".join(dict.fromkeys(ends)))
        say(f"{self._request}: {self._prompt_tokens} in, {self._came} out{pace}, {why}")
        if "lost" in ends:
            text = f"{self._request} is lost: {clean(self._loss) or 'the event request.lost has the reason'}"
            raise exits.Failure(text, exits.ERROR)
        return exits.DONE

    async def _sample(self, sample: int, *, live: bool) -> tuple[str, str | None, int]:
        """Return (text, finish reason, number of samples) of one sample when it has ended."""
        from ppconsole.link.source import LinkLost, QueryFailed
        from ppconsole.model.safe import clean

        tokens, text, silent = 0, "", False
        while True:
            try:
                part = await self._link.fetch(
                    self._request, offset=tokens, text_offset=len(text), sample=sample, wait_ms=1000
                )
            except LinkLost as error:
                await self._back(str(error))
                continue
            except QueryFailed as error:
                # An engine without the request may be a successor of ours.
                if await has_ended(self._engine):
                    raise self._gone() from None
                if not error.passing:
                    raise
                if not silent:
                    say(f"{error}; the stream waits")
                silent = True
                await asyncio.sleep(AGAIN_S)
                continue
            silent = False
            end = part.offset + len(part.token_ids)
            self._came += end - tokens
            tokens, text = end, text + part.text
            self._prompt_tokens, self._loss = part.prompt_tokens, part.loss or self._loss
            if self._json:
                self._print_part(part)
            elif live and part.text:
                click.echo(clean(part.text, newlines=True), nl=False)
                sys.stdout.flush()
            if part.finished:
                if live and not self._json:
                    click.echo()
                return text, part.finish_reason, part.samples

    async def _back(self, why: str) -> None:
        """Wait until the link is back. Raises Failure once the engine is gone."""
        from ppconsole.link.source import LinkLost

        if not await has_ended(self._engine):
            say(f"{why}; waiting for the link to come back")
        while not await has_ended(self._engine):
            with contextlib.suppress(LinkLost):
                await self._link.attached(GONE_S)
                await asyncio.sleep(0.1)
                return
        raise self._gone()

    def _gone(self) -> exits.Failure:
        engine = f"engine {self._engine.name} ({self._engine.id})"
        text = f"{engine} is gone, and {self._request} with it: {self._came} tokens came"
        return exits.Failure(text, exits.NO_ENGINE)

    def _print_part(self, part: Any) -> None:
        line = {"sample": part.sample, "text": part.text, "token_ids": part.token_ids}
        if part.logprobs:
            line["logprobs"] = [{"chosen": entry.chosen, "top": entry.top} for entry in part.logprobs]
        if part.finished:
            line |= {"finish_reason": part.finish_reason, "prompt_tokens": part.prompt_tokens}
            line |= {"loss": part.loss} if part.loss else {}
        if part.text or part.token_ids or part.finished:
            print_json(line)

    def _show_sample(self, index: int, samples: int, text: str, *, already: bool) -> None:
        from ppconsole.model.safe import clean

        if not self._json and not already:
            click.echo(f"--- {index + 1} of {samples}\n{clean(text, newlines=True)}")
