"""Sending a prompt and streaming the output of one request into the output lines."""

from __future__ import annotations

import asyncio
from functools import partial

from ppengine.protocol.control import Accepted, Deferred, Outcome
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.verbs import Submit

from ppconsole.link.source import LinkLost, QueryFailed
from ppconsole.screens.console import Console, GiveBack

RETRY_S = 1.0


class Following:
    """Follows at most one request. `request` None: none."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.request: str | None = None

    def submit(self, verb: Submit, give_back: GiveBack) -> None:
        """Send a prompt and follow its output. The line of one that is not taken is given back."""
        if why := self._console.model.refusal("submit", "prompt"):
            give_back(why, opens=True)
        else:
            self._console.run_worker(self._submit(verb, give_back), name="submit", exit_on_error=False)

    async def _submit(self, verb: Submit, give_back: GiveBack) -> None:
        try:
            answer = await self._console.source.command(verb, on_progress=partial(self._accepted, verb.prompt or ""))
        except LinkLost as error:
            if error.sent:
                self._console.report(f"prompt: outcome unknown: {error}", bad=True)
            else:
                give_back(f"prompt: not sent: {error}")
            return
        if not isinstance(answer, Outcome):
            give_back(f"prompt refused: {answer.code}: {answer.text}")
        elif answer.state == "failed":
            give_back(f"prompt failed: {answer.text}")
        elif answer.request and self.request != answer.request:
            self._follow_new(answer.request, verb.prompt or "")

    def _accepted(self, prompt: str, message: Accepted | Deferred) -> None:
        """Follow the new request as soon as it has an id."""
        if isinstance(message, Accepted) and message.request:
            self._follow_new(message.request, prompt)

    def _follow_new(self, request: str, prompt: str) -> None:
        """Follow a request whose prompt was sent from here."""
        self._console.model.add_prompt(request, prompt)
        self.follow(request)

    def follow(self, request: str) -> None:
        """Stream the output of `request`."""
        self.request = request
        self.start()
        self._console.paint()

    def start(self) -> None:
        """Start the stream, or restart it after a failure."""
        self._console.run_worker(self._run(), name="follow", group="follow", exclusive=True, exit_on_error=False)

    async def _run(self) -> None:
        """Fetch until the output ends; retry while the link is lost."""
        console, request = self._console, self.request
        await self._know_prompt(request)
        while request is not None and request == self.request:
            output = console.model.state.outputs.get(request)
            if output is not None and output.finished:
                return
            offset, characters = (output.tokens, output.characters) if output else (0, 0)
            try:
                fetched = await console.source.fetch(request, offset=offset, text_offset=characters, wait_ms=1000)
            except LinkLost:
                await asyncio.sleep(RETRY_S)
                continue
            except QueryFailed as error:
                if error.passing:
                    await asyncio.sleep(RETRY_S)
                    continue
                console.report(f"{request}: {error}", bad=True)
                self.request = None
                return
            console.model.add_output(fetched)
            console.paint_soon()

    async def _know_prompt(self, request: str | None) -> None:
        """Fetch the prompt of a request that was not sent from here; without it the output has none."""
        output = self._console.model.state.outputs.get(request or "")
        if request is None or (output is not None and output.prompt):
            return
        try:
            detail = await self._console.source.inspect("request", request=request)
        except (LinkLost, QueryFailed):
            return  # the fetch that follows reports it
        if isinstance(detail, RequestDetail) and detail.prompt_text:
            self._console.model.add_prompt(request, detail.prompt_text)
            self._console.paint_soon()

    def copy_answer(self) -> None:
        """Copy the text of the followed request."""
        output = self._console.model.state.outputs.get(self.request or "")
        if output is None or not output.text:
            self._console.report("no answer to copy: send a prompt, or f follows the selected request", bad=True)
        else:
            left_out = output.characters - len(output.text)
            self._console.copying.answer(output.request, output.text, left_out)
