"""Answers of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ppengine.http import answer_fields as fields
from ppengine.http.answer_forms import ChunkedAnswer, ending_of, pairs, prompt_tokens
from ppengine.http.chat_fields import ChatRequest
from ppengine.http.generation import Generation, Part
from ppengine.http.reply.reply_events import Event, settled
from ppengine.http.reply.reply_reader import ReplyFactory, ReplyReader
from ppengine.http.service import Service
from ppengine.protocol.control import Logprob


class ChatAnswer(ChunkedAnswer):
    """See `Answer`."""

    def __init__(
        self, name: str, service: Service, request: ChatRequest, generation: Generation, replies: ReplyFactory
    ) -> None:
        super().__init__(name, service, request, [generation])
        self._wanted, self._replies = request.wanted_logprobs(), replies
        self.plain = replies.plain and not self._with_ids
        self._scored = request.prompt_logprobs
        self._choices = [_Choice(replies, request.include_reasoning is not False) for _ in range(generation.choices)]

    def chunk(self, part: Part | None, usage: fields.Usage | msgspec.UnsetType | None) -> fields.ChatChunk | None:
        """See `ChunkedAnswer`. The role comes with the first token: a chunk before it would be counted as one."""
        choices, prompt_ids = [], None
        if part is not None:
            choice = self._choices[part.choice]
            delta, reason = choice.delta(part)
            choice.waiting.append(part)
            if delta is None:
                return None
            if not choice.begun:
                choice.begun, delta.role = True, "assistant"
                prompt_ids = self._generations[0].prompt_ids
            logprobs = self._logprobs(choice.waiting)
            choices = [fields.ChatChunkChoice(index=part.choice, delta=delta, logprobs=logprobs, finish_reason=reason)]
            ending_of(choices[0], choice.waiting, ids=self._with_ids)
            choice.waiting = []
        chunk = fields.ChatChunk(id=self._name, created=self._created, model=self._model, choices=choices, usage=usage)
        if self._with_ids and prompt_ids is not None:
            chunk.prompt_token_ids = prompt_ids
        return chunk

    def whole(self, parts: list[list[Part]]) -> fields.ChatCompletion:
        """See `Answer`."""
        choices = []
        for index, (one, choice) in enumerate(zip(parts, self._choices, strict=True)):
            message, reason = choice.message(one)
            made = fields.ChatChoice(index=index, message=message, logprobs=self._logprobs(one), finish_reason=reason)
            ending_of(made, one, ids=self._with_ids)
            choices.append(made)
        whole = fields.ChatCompletion(
            id=self._name, created=self._created, model=self._model, choices=choices, usage=self.usage()
        )
        if self._with_ids:
            whole.prompt_token_ids = self._generations[0].prompt_ids
        if self._scored is not None:
            whole.prompt_logprobs = prompt_tokens(self._generations[0], self._tokenizer, self._scored)
        return whole

    def usage(self) -> fields.Usage:
        """See `ChunkedAnswer`."""
        usage = super().usage()
        if self._replies.form.reasoning is not None:
            reasoning = sum(choice.reader.reasoning_tokens for choice in self._choices)
            usage.completion_tokens_details = fields.CompletionDetails(reasoning)
        return usage

    def _logprobs(self, parts: list[Part]) -> fields.ChatLogprobs | None:
        if self._wanted is None:
            return None
        return fields.ChatLogprobs([_token_logprob(self._token_text, *pair, self._wanted) for pair in pairs(parts)])


class _Choice:
    """One reply and its state."""

    def __init__(self, replies: ReplyFactory, reasons: bool) -> None:
        """`reasons`: whether the answer has the reasoning."""
        self._replies, self._reasons = replies, reasons
        self.reader: ReplyReader = replies.reader()
        self.begun = False
        self.waiting: list[Part] = []
        """Parts whose text is held back."""
        self._calls = 0

    def delta(self, part: Part) -> tuple[fields.ChatDelta | None, str | None]:
        """Return what a part adds, None if nothing yet, and the finish reason."""
        if self._replies.plain:
            text = part.text if part.text or not self.begun else msgspec.UNSET
            return fields.ChatDelta(content=text), part.finish_reason
        over = part.finish_reason is not None
        events = self.reader.push(part.text, len(part.token_ids), last=over)
        delta = self._delta(events)
        empty = delta == fields.ChatDelta()
        return None if empty and not over else delta, self.reader.finish_reason(part.finish_reason)

    def message(self, parts: list[Part]) -> tuple[fields.ChatMessage, str | None]:
        """Return the whole reply and its finish reason."""
        if self._replies.plain:
            return fields.ChatMessage(content="".join(part.text for part in parts)), parts[-1].finish_reason
        events: list[Event] = []
        for part in parts:
            events += self.reader.push(part.text, len(part.token_ids), last=part.finish_reason is not None)
        delta = self._delta(settled(events))
        other = delta.reasoning is not msgspec.UNSET or delta.tool_calls is not msgspec.UNSET
        message = fields.ChatMessage(
            content=delta.content if delta.content is not msgspec.UNSET else None if other else "",
            reasoning_content=delta.reasoning_content, reasoning=delta.reasoning,
        )  # fmt: skip
        if delta.tool_calls is not msgspec.UNSET:
            message.tool_calls = [fields.Call(id=str(one.id), function=one.function) for one in delta.tool_calls]
        return message, self.reader.finish_reason(parts[-1].finish_reason)

    def _delta(self, events: Iterable[Event]) -> fields.ChatDelta:
        """Return all that events add. A broken call that was not settled goes on as content."""
        content, reasoning, calls = "", "", list[fields.CallDelta]()
        for event in events:
            if event.kind == "reasoning":
                reasoning += event.text if self._reasons else ""
            elif event.kind == "text":
                content += event.text
            elif event.kind == "broken":
                content += event.source
            elif event.kind == "call":
                function = fields.CallFunction(name=event.text, arguments="")
                name = self._replies.call_id()
                calls.append(fields.CallDelta(index=self._calls, id=name, type="function", function=function))
                self._calls += 1
            elif event.kind == "arguments":
                if not calls:
                    calls.append(fields.CallDelta(index=self._calls - 1, function=fields.CallFunction(arguments="")))
                calls[-1].function.arguments += event.text
        return fields.ChatDelta(
            content=content or msgspec.UNSET, reasoning_content=reasoning or msgspec.UNSET,
            reasoning=reasoning or msgspec.UNSET, tool_calls=calls or msgspec.UNSET,
        )  # fmt: skip


def _token_logprob(text_of: Callable[[int], str], token: int, logprob: Logprob, most: int) -> fields.TokenLogprob:
    text = text_of(token)
    top = [fields.TopLogprob(word := text_of(one), value, list(word.encode())) for one, value in logprob.top[:most]]
    return fields.TokenLogprob(text, logprob.chosen, list(text.encode()), top)
