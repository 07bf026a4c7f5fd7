"""The requests of a program that have not ended: tokens of the core become text, up to a stop text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ppengine.checkpoint.piece_text import PieceText
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.offline.request_output import CompletionOutput, RequestOutput
from ppengine.protocol.control import Logprob
from ppengine.protocol.offline import News, Piece
from ppengine.protocol.prompt_scores import PromptLogprob
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.timings import Timings
from ppengine.protocol.token_ids import TokenIds


@dataclass(slots=True)
class _Sample:
    """One continuation."""

    text: PieceText | None = None
    """None: nothing has come, or its text is not wanted."""
    known: int = 0
    """Tokens that have come, also those behind a stop text."""
    ended: bool = False
    """Whether the core has ended it."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class OpenRequest:
    """One request."""

    prompt: str | None
    """Its text, if it has one."""
    prompt_ids: TokenIds
    sampling: SamplingParams
    """With its stop texts, which the core does not have."""
    samples: list[_Sample] = field(init=False)
    left: int = field(init=False)
    """Samples that the core has not ended."""
    _prompt_logprobs: list[PromptLogprob | None] | None = None
    _cached_tokens: int | None = None
    _timings: Timings | None = None

    def __post_init__(self) -> None:
        """Begin the samples."""
        self.left = self.sampling.n
        self.samples = [_Sample() for _ in range(self.left)]

    def take(self, piece: Piece, tokenizer: Callable[[], Tokenizer | None]) -> bool:
        """Take the new tokens of a piece; return whether the core must still end the sample, at a stop text."""
        sample, reason = self.samples[piece.sample], piece.finish_reason
        sample.known += len(piece.token_ids)
        if piece.prompt_logprobs:
            self._prompt_logprobs = piece.prompt_logprobs
        if sample.finish_reason is None:
            self._add(sample, piece, tokenizer)
        if reason is None:
            return sample.finish_reason is not None
        sample.ended = True
        self.left -= 1
        if not piece.sample:
            self._cached_tokens, self._timings = piece.cached_tokens, piece.timings
        return False

    def _add(self, sample: _Sample, piece: Piece, tokenizer: Callable[[], Tokenizer | None]) -> None:
        tokens, reason = piece.token_ids, piece.finish_reason
        if sample.text is None and self.sampling.detokenize and (known := tokenizer()) is not None:
            sample.text = PieceText(known.stream(self.prompt_ids), self.sampling.stop, self.sampling.min_tokens)
        kept = len(tokens)
        if sample.text is not None:
            text, _, kept, reason = sample.text.take(tokens, reason)
            sample.texts.append(text)
        sample.token_ids += tokens[:kept]
        sample.logprobs += piece.logprobs[:kept]
        sample.finish_reason = reason
        if reason == "stop":
            last = sample.token_ids[-1] if sample.token_ids else None
            by_text = None if sample.text is None else sample.text.stop_text
            sample.stop_reason = by_text or (last if last in self.sampling.stop_token_ids else None)

    def output(self, name: str) -> RequestOutput:
        """Return all of it so far; nothing of that changes later."""
        samples = []
        for index, sample in enumerate(self.samples):
            if len(sample.texts) > 1:
                sample.texts = ["".join(sample.texts)]
            text = sample.texts[0] if sample.texts else ""
            samples.append(
                CompletionOutput(
                    index, text, list(sample.token_ids), sample.finish_reason, list(sample.logprobs), sample.stop_reason
                )
            )
        over = not self.left
        return RequestOutput(
            name, self.prompt, self.prompt_ids.tolist(), samples, over, self._prompt_logprobs,
            self._cached_tokens if over else None, self._timings if over else None,
        )  # fmt: skip


@dataclass(slots=True)
class Taken:
    """The effects of an answer of the core."""

    changed: dict[str, OpenRequest] = field(default_factory=dict)
    stopped: list[tuple[str, int]] = field(default_factory=list)
    """Samples that the core must end, as they have met a stop text."""
    ended: list[str] = field(default_factory=list)
    """Requests that the core may forget."""
    gap: bool = False
    """Whether tokens are missing: the core must send all again."""


class OpenRequests:
    """Requests by name. `tokenizer` is called when there is text to make."""

    def __init__(self, tokenizer: Callable[[], Tokenizer | None]) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, OpenRequest] = {}
        self._with_stops = 0

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._requests)

    @property
    def have_stops(self) -> bool:
        """Whether a stop text may end one of them, so that their tokens are needed as they come."""
        return self._with_stops > 0

    def add(self, requests: Mapping[str, OpenRequest]) -> None:
        """Add requests that the core has taken."""
        self._requests.update(requests)
        self._with_stops += sum(1 for one in requests.values() if one.sampling.stop)

    def take(self, news: News) -> Taken:
        """Take the pieces of an answer, and forget the requests that have ended."""
        taken = Taken()
        for piece in news.all_pieces():
            one = self._requests.get(piece.request)
            if one is None:
                # Of a call that was refused, or interrupted. The output goes with its last sample.
                taken.ended += [piece.request] if piece.finish_reason is not None else []
                continue
            sample = one.samples[piece.sample]
            if sample.ended:
                continue  # All was sent again, as an answer was lost.
            if not piece.skip(sample.known):
                taken.gap = True
                continue
            taken.changed[piece.request] = one
            if one.take(piece, self._tokenizer):
                taken.stopped.append((piece.request, piece.sample))
            if not one.left:
                del self._requests[piece.request]
                self._with_stops -= bool(one.sampling.stop)
                taken.ended.append(piece.request)
        return taken
