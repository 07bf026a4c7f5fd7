"""From the texts of a submission to token ids: short ones here, chats and long ones in a child."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from ppengine.checkpoint.prompt_encoder import PromptEncoder, TextTooLongError
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.template_process import TemplateProcess, TooManyChatsError
from ppengine.protocol.chat_messages import CHAT_MOST, Chat, Rendered, Tokenized
from ppengine.protocol.control import ErrorCode
from ppengine.protocol.text_messages import Encode, Encoded
from ppengine.protocol.verbs import Submit

INLINE_CHARACTERS = 2000
"""Longer texts are tokenized in the child: these take a millisecond, and others wait for none."""
_REFUSALS = (TooManyChatsError, ValueError)


class SubmissionEncoder:
    """Answers each `Encode` once. `answer` takes the answers, in this turn or in a later one."""

    def __init__(
        self, tokenizer: Tokenizer, max_model_len: int, templates: TemplateProcess, answer: Callable[[Encoded], None]
    ) -> None:
        self._tokenizer, self._encoder = tokenizer, PromptEncoder(tokenizer, max_model_len)
        self._max_model_len, self._templates, self._answer = max_model_len, templates, answer
        self._open: dict[str, Submit] = {}
        """Submissions that wait for the child, with the tokens of their bad words, by id."""

    def take(self, message: Encode) -> None:
        """Encode a submission, unless it is under way."""
        if message.id in self._open:
            return
        try:
            submit = self._by_ids(message.id, message.submit)
        except _REFUSALS as problem:
            self._answer(Encoded(id=message.id, error=str(problem), code=_code_of(problem)))
        else:
            if submit is not None:
                self._answer(Encoded(id=message.id, submit=submit))

    def _by_ids(self, name: str, submit: Submit) -> Submit | None:
        """Return the submission by ids; None if it waits for the child. Raises a refusal."""
        submit = self._with_bad_words_ids(submit)
        text = submit.prompt
        if submit.chat and (text is None or submit.prompt_token_ids is not None):
            raise ValueError("a chat is a prompt text, without prompt_token_ids")
        if text is None:
            return submit
        if submit.prompt_token_ids is not None:
            raise ValueError("give either a prompt text or prompt_token_ids")
        self._encoder.checked(text)
        if not submit.chat and len(text) <= INLINE_CHARACTERS:
            return by_tokens(submit, self._tokenizer.encode(text))
        self._templates.check_room()
        self._open[name] = submit
        if submit.chat:
            chat = Chat(messages=[{"role": "user", "content": text}])
            self._templates.render(chat, min(self._encoder.most, CHAT_MOST), partial(self._rendered, name))
        else:
            self._templates.tokenize([text], partial(self._tokenized, name))
        return None

    def _with_bad_words_ids(self, submit: Submit) -> Submit:
        sampling = submit.sampling
        if not sampling.bad_words:
            return submit
        ids = self._encoder.bad_words_ids(sampling)
        return msgspec.structs.replace(
            submit, sampling=msgspec.structs.replace(sampling, bad_words=[], bad_words_ids=ids)
        )  # fmt: skip

    def _rendered(self, name: str, answer: Rendered | Tokenized) -> None:
        if answer.error or not isinstance(answer, Rendered):
            self._refuse(name, answer)
            return
        text = answer.text
        try:
            tokenizer = self._encoder.checked(text)
            ids = tokenizer.encode_chat(text) if len(text) <= INLINE_CHARACTERS else None
        except ValueError as problem:
            del self._open[name]
            self._answer(Encoded(id=name, error=str(problem), code=_code_of(problem)))
            return
        if ids is not None:
            self._end(name, ids)
        else:
            self._templates.tokenize([text], partial(self._tokenized, name), special=False)

    def _tokenized(self, name: str, answer: Rendered | Tokenized) -> None:
        if answer.error or not isinstance(answer, Tokenized):
            self._refuse(name, answer)
        else:
            self._end(name, answer.token_ids[0])

    def _refuse(self, name: str, answer: Rendered | Tokenized) -> None:
        del self._open[name]
        self._answer(Encoded(id=name, error=answer.error, code=answer.code))

    def _end(self, name: str, ids: list[int]) -> None:
        submit, count, most = self._open.pop(name), len(ids), self._max_model_len
        if count < most:
            self._answer(Encoded(id=name, submit=by_tokens(submit, ids)))
            return
        # The core would refuse it, but the tokens may be larger than a message.
        text = f"the prompt has {count} tokens, max_model_len is {most}; at most {most - 1} would fit"
        self._answer(Encoded(id=name, error=text, code="DOES_NOT_FIT"))


def by_tokens(submit: Submit, ids: list[int]) -> Submit:
    """Return a submission with the tokens of its prompt in place of its text."""
    return msgspec.structs.replace(submit, prompt=None, prompt_token_ids=ids, chat=False)


def _code_of(problem: Exception) -> ErrorCode:
    match problem:
        case TooManyChatsError():
            return "BUSY"
        case TextTooLongError():
            return "DOES_NOT_FIT"
    return "INVALID"
