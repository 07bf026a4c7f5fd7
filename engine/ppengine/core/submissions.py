"""From a submission to requests: text to ids, names and seeds; an invalid one is refused in one line."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.checkpoint.prompt_encoder import PromptEncoder, TextTooLongError
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.core.outputs import OutputHub
from ppengine.core.scheduler import DoesNotFit
from ppengine.core.scheduler.request import Request
from ppengine.protocol.allowed_keys import OWNER
from ppengine.protocol.chat_messages import CHAT_MOST, Chat
from ppengine.protocol.prompt_scores import VALUES_MOST, values_of
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.token_ids import TokenIds, beyond, compact
from ppengine.protocol.verbs import Submit

NAME_MOST = 128
INLINE_CHARACTERS = 2000
"""Longer texts are tokenized in another process: these take the core a millisecond."""


class Submissions:
    """Makes the requests of a prompt, one per sample. `taken` contains the request ids in use."""

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer | None, max_model_len: int, taken: OutputHub) -> None:
        self._vocab_size = spec.vocab_size
        self._encoder = PromptEncoder(tokenizer, max_model_len)
        self._max_model_len = max_model_len
        self._taken = taken
        self._count = 0
        self._first_name = secrets.randbits(16)

    def requests(
        self, verb: Submit, owner: str, principal: str = OWNER, client: str = "", tokens: TokenIds | None = None
    ) -> list[Request]:
        """Return the requests of a submission. `owner` is the user's name, `principal` that of the key.

        `tokens` are those of the prompt, if `verb` has none. Raises ValueError for an invalid submission, DoesNotFit
        for a prompt that is too long to tokenize.
        """
        ids = self._ids(verb, tokens)
        sampling = self._sampling(verb.sampling)
        name = self._name(verb.request)
        if (values := values_of(len(ids), sampling.prompt_logprobs)) > VALUES_MOST:
            what = f"prompt_logprobs of {sampling.prompt_logprobs} for {len(ids)} tokens are {values} values"
            raise ValueError(f"{what}; at most {VALUES_MOST} are taken")
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(62)
        leader = Request(
            id=name, prompt_ids=ids, sampling=sampling, seed=seed, owner=owner, principal=principal,
            client=client, priority=verb.priority,
        )  # fmt: skip
        followers = [
            Request(
                id=f"{name}.{index}", prompt_ids=ids, sampling=sampling, seed=seed, owner=owner,
                principal=principal, client=client, priority=verb.priority, sample=index, leader=leader,
            )
            for index in range(1, sampling.n)
        ]  # fmt: skip
        return [leader, *followers]

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return checked sampling parameters, with the tokens of bad words among `bad_words_ids`."""
        sequences = self._encoder.bad_words_ids(sampling)
        self._check_vocabulary("stop_token_ids", sampling.stop_token_ids)
        self._check_vocabulary("logit_bias", list(sampling.logit_bias or {}))
        self._check_vocabulary("allowed_token_ids", sampling.allowed_token_ids or [])
        self._check_vocabulary("bad_words_ids", [token for ids in sampling.bad_words_ids for token in ids])
        if not sampling.bad_words:
            return sampling
        return msgspec.structs.replace(sampling, bad_words_ids=sequences)

    def _ids(self, verb: Submit, tokens: TokenIds | None) -> TokenIds:
        given = tokens or verb.prompt_token_ids
        if (verb.prompt is None) == (given is None) or (tokens and verb.prompt_token_ids is not None):
            raise ValueError("give either a prompt text or prompt_token_ids")
        ids: Sequence[int]
        if verb.prompt is None:
            ids = given or []
        else:
            ids = self._checked(verb.prompt).encode(verb.prompt)
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        if len(ids) < self._max_model_len:
            # The scheduler refuses longer prompts anyway.
            return self._known(ids)
        return compact(bytes(len(ids)))

    def _known(self, ids: Sequence[int]) -> TokenIds:
        """Return the tokens of a prompt. Raises ValueError for one that is not in the vocabulary."""
        try:
            tokens = compact(ids)
            if not beyond(tokens, self._vocab_size):
                return tokens
        except OverflowError:
            pass
        wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
        raise ValueError(f"token id {wrong} is not in the vocabulary (0 to {self._vocab_size - 1})")

    def chat(self, verb: Submit) -> tuple[Chat, int]:
        """Return the chat of a prompt, and the most characters of its text. Raises as `requests`."""
        if verb.prompt is None or verb.prompt_token_ids is not None:
            raise ValueError("a chat is a prompt text, without prompt_token_ids")
        self._checked(verb.prompt)
        return Chat(messages=[{"role": "user", "content": verb.prompt}]), min(self._encoder.most, CHAT_MOST)

    def rendered(self, verb: Submit, text: str) -> Submit:
        """Return the submission of a chat by the tokens of its text."""
        return by_tokens(verb, self._checked(text).encode_chat(text))

    def long_text(self, verb: Submit) -> str | None:
        """Return the text of a prompt if it is too long to be tokenized here. Raises as `requests` if it cannot fit."""
        text = verb.prompt
        if text is None or verb.prompt_token_ids is not None or len(text) <= INLINE_CHARACTERS:
            return None
        self._checked(text)
        return text

    def _checked(self, text: str) -> Tokenizer:
        """Return the tokenizer for `text`. Raises ValueError if there is none, DoesNotFit for a text too long."""
        try:
            return self._encoder.checked(text)
        except TextTooLongError as error:
            raise DoesNotFit(str(error), error.characters, error.most) from None

    def _check_vocabulary(self, field: str, ids: list[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise ValueError(f"{field}: token id {wrong} is not in the vocabulary (0 to {self._vocab_size - 1})")

    def _name(self, wanted: str | None) -> str:
        if not wanted:
            return self._new_name()
        if len(wanted) > NAME_MOST or not wanted.isprintable() or " " in wanted:
            shown = wanted if len(wanted) <= NAME_MOST else f"{wanted[:20]}... of {len(wanted)} characters"
            raise ValueError(f"request id {shown!r}: use 1 to {NAME_MOST} printable characters without spaces")
        if wanted in self._taken:
            raise ValueError(f"request id {wanted} is already in use")
        return wanted

    def _new_name(self) -> str:
        """Return a short unused id: four digits, spread so that successive ids look different."""
        while True:
            turn, number = divmod(self._count, 0x10000)
            self._count += 1
            name = f"r-{turn * 0x10000 + (self._first_name + number * 0x9E37) % 0x10000:04x}"
            if name not in self._taken:
                return name


def by_tokens(verb: Submit, ids: list[int]) -> Submit:
    """Return a submission with the tokens of its prompt in place of its text."""
    return msgspec.structs.replace(verb, prompt=None, prompt_token_ids=ids, chat=False)
