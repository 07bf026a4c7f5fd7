"""Sending a prompt and streaming the output of one request into the output lines."""

from __future__ import annotations

import asyncio

from ppengine.protocol.control import Accepted, Deferred, Outcome
from ppengine.protocol.verbs import Submit

from ppconsole.link.source import LinkLost, QueryFailed
from ppconsole.screens.console import Console

RETRY_S = 1.0


class Following:
    """Follows at most one request. `request` None: none."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.request: str | None = None

    def submit(self, verb: Submit) -> None:
        """Send a prompt and follow its output."""
        why = self._console.model.verbs_off()
        if why:
            self._console.report(f"prompt: {why}", bad=True)
            return
        self._console.run_worker(self._submit(verb), name="submit", exit_on_error=False)

    async def _submit(self, verb: Submit) -> None:
        try:
            answer = await self._console.source.command(verb, on_progress=self._accepted)
        except LinkLost as error:
            known = "outcome unknown" if error.sent else "not sent"
            self._console.report(f"prompt: {known}: {error}", bad=True)
            return
        if not isinstance(answer, Outcome):
            self._console.report(f"prompt refused: {answer.code}: {answer.text}", bad=True)
        elif answer.state == "failed":
            self._console.report(f"prompt failed: {answer.text}", bad=True)
        elif answer.request and self.request != answer.request:
            self.follow(answer.request)

    def _accepted(self, message: Accepted | Deferred) -> None:
        """Follow the new request as soon as it has an id."""
        if isinstance(message, Accepted) and message.request:
            self.follow(message.request)

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
                console.report(f"{request}: {error}", bad=True)
                self.request = None
                return
            console.model.add_output(fetched)
            console.paint_soon()
