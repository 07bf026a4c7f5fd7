"""Adds the texts of prompt and output to the details of requests that consoles ask for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.frames import decode_as, encode
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.token_ids import TokenIds, compact
from ppengine.texts.core_questions import CoreQuestions
from ppengine.texts.request_text import SampleText, text_of

KEPT = 32
"""Requests whose texts are kept: a console looks at one of them once a second."""


@dataclass(slots=True)
class _Known:
    """The texts of one detail, as far as its tokens went."""

    prompt: TokenIds
    sampling: SamplingParams
    prompt_text: str
    bad_words: list[str]
    sample: SampleText
    tokens: TokenIds = field(default_factory=compact)

    def begins(self, detail: RequestDetail) -> bool:
        """Return whether the output of `detail` goes on where this one was."""
        count, tokens = len(self.tokens), detail.output_token_ids
        same = self.sampling == detail.sampling and self.prompt == compact(detail.prompt_token_ids)
        more = self.sample.reason is None or count == len(tokens)
        return same and more and self.tokens == compact(tokens[:count])


class DetailReader:
    """`answer` takes the answers."""

    def __init__(
        self, tokenizer: Tokenizer, eos: Collection[int], core: CoreQuestions,
        answer: Callable[[Inspected | Failed], None], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._tokenizer, self._eos, self._core, self._answer, self._clock = tokenizer, eos, core, answer, clock
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def inspect(self, question: Inspect) -> None:
        """Ask the core for a detail, and answer with its texts."""
        asked = msgspec.structs.replace(question, nonce=self._core.number())
        self._core.ask(asked, lambda answer: self._take(question, answer), self._clock() + self._core.answer_s)

    def _take(self, question: Inspect, answer: object) -> None:
        assert isinstance(answer, Inspected | Failed), "an answer is known by its number"
        if isinstance(answer, Inspected) and question.what == "request":
            detail = self._with_texts(decode_as(RequestDetail, answer.data))
            answer = Inspected(nonce=question.nonce, what=answer.what, data=msgspec.Raw(encode(detail)))
        self._answer(msgspec.structs.replace(answer, nonce=question.nonce))

    def _with_texts(self, detail: RequestDetail) -> RequestDetail:
        known = self._known.get(detail.id)
        if known is None or not known.begins(detail):
            prompt, sampling = detail.prompt_token_ids, detail.sampling
            sample = text_of(prompt, sampling, self._tokenizer, self._eos, speaks=True)
            text = self._tokenizer.decode(prompt)
            # Most words have two sequences, one with a space in front.
            banned = dict.fromkeys(self._tokenizer.decode(ids).strip() for ids in sampling.bad_words_ids)
            known = self._known[detail.id] = _Known(compact(prompt), sampling, text, list(banned), sample)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(detail.id)
        sample, over = known.sample, detail.finished_s is not None
        # Only a stop token matters among the reasons.
        sample.take(0, detail.output_token_ids, (detail.why if detail.why == "stop" else "over") if over else None)
        known.tokens = compact(detail.output_token_ids)
        texts = msgspec.structs.replace(
            detail, prompt_text=known.prompt_text, output_text=sample.text, bad_words=known.bad_words
        )  # fmt: skip
        if sample.stopped:
            texts.output_token_ids, texts.output_tokens = detail.output_token_ids[: sample.kept], sample.kept
            texts.why = "stop" if over else texts.why
        return texts
