"""From a submission to requests: names and seeds for token ids; an invalid one is refused in one line."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.absent_texts import check_sampling_without_tokenizer
from ppengine.core.outputs import OutputHub
from ppengine.core.scheduler.request import Request
from ppengine.protocol.allowed_keys import OWNER
from ppengine.protocol.prompt_scores import VALUES_MOST, values_of
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.token_ids import TokenIds, beyond, compact
from ppengine.protocol.verbs import Submit

NAME_MOST = 128


class Submissions:
    """Makes the requests of a prompt, one per sample. `taken` contains the request ids in use.

    `has_tokenizer`: the engine has one, in other processes.
    """

    def __init__(self, spec: ModelSpec, max_model_len: int, taken: OutputHub, *, has_tokenizer: bool) -> None:
        self._vocab_size = spec.vocab_size
        self._has_tokenizer = has_tokenizer
        self._max_model_len = max_model_len
        self._taken = taken
        self._count = 0
        self._first_name = secrets.randbits(16)

    def requests(
        self, verb: Submit, owner: str, principal: str = OWNER, client: str = "", tokens: TokenIds | None = None,
        arrived: float = 0.0,
    ) -> list[Request]:  # fmt: skip
        """Return the requests of a submission. `owner` is the user's name, `principal` that of the key.

        `tokens` are those of the prompt, if `verb` has none. `arrived`: when the first process of the engine got it;
        admission checks that. Raises ValueError for an invalid submission.
        """
        ids, sampling = self._ids(verb, tokens), verb.sampling
        self._check_sampling(sampling)
        name = self._name(verb.request)
        if (values := values_of(len(ids), sampling.prompt_logprobs)) > VALUES_MOST:
            what = f"prompt_logprobs of {sampling.prompt_logprobs} for {len(ids)} tokens are {values} values"
            raise ValueError(f"{what}; at most {VALUES_MOST} are taken")
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(62)
        leader = Request(
            id=name, prompt_ids=ids, sampling=sampling, seed=seed, owner=owner, principal=principal,
            client=client, priority=verb.priority, arrival_time=arrived, cache_salt=verb.cache_salt or "",
        )  # fmt: skip
        followers = [
            Request(
                id=f"{name}.{index}", prompt_ids=ids, sampling=sampling, seed=seed, owner=owner,
                principal=principal, client=client, priority=verb.priority, sample=index, leader=leader,
                arrival_time=arrived, cache_salt=verb.cache_salt or "",
            )
            for index in range(1, sampling.n)
        ]  # fmt: skip
        return [leader, *followers]

    def _check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ValueError for tokens that the model does not have, and for texts in an engine without a tokenizer."""
        if not self._has_tokenizer:
            check_sampling_without_tokenizer(sampling)
        self._check_vocabulary("stop_token_ids", sampling.stop_token_ids)
        self._check_vocabulary("logit_bias", list(sampling.logit_bias or {}))
        self._check_vocabulary("allowed_token_ids", sampling.allowed_token_ids or [])
        self._check_vocabulary("bad_words_ids", [token for ids in sampling.bad_words_ids for token in ids])

    def _ids(self, verb: Submit, tokens: TokenIds | None) -> TokenIds:
        ids: Sequence[int] | None = tokens or verb.prompt_token_ids
        if ids is None or (tokens and verb.prompt_token_ids is not None):
            raise ValueError("give either a prompt text or prompt_token_ids")
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


def check_ids_alone(verb: Submit, *, stops: bool) -> None:
    """Raise ValueError for a submission with a text: other processes make tokens of it, and find stop texts.

    `stops`: stop texts may be there. The core keeps those of consoles, and does not read them.
    """
    given = {
        "prompt": verb.prompt is not None or verb.chat, "stop": not stops and verb.sampling.stop,
        "bad_words": verb.sampling.bad_words,
    }  # fmt: skip
    if name := next((name for name, text in given.items() if text), ""):
        raise ValueError(f"{name} is a text; {'the core' if stops else 'a session'} has token ids alone")
