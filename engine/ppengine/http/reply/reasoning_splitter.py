"""Reasoning in front of a reply: `<think>...</think>`."""

from __future__ import annotations

from ppengine.http.reply.growing_parser import GrowingParser, Step

BEGIN, END = "<think>", "</think>"


class ReasoningSplitter(GrowingParser):
    """Gives out reasoning, then text. `inside`: the prompt ends with the beginning of the reasoning."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self._inside = inside

    def parse(self) -> Step[None]:
        """Parse reasoning if the text begins with it, then text."""
        yield from self.space()
        if self._inside or (yield from self.accept(BEGIN)):
            yield from self.space()
            self.give("reasoning", "")
            if (yield from self.text_until((END,), "reasoning")):
                yield from self.space()
                self.give("reasoning", "")
        yield from self.text_until(())


def begins_inside(prompt: str) -> bool:
    """Return whether a rendered prompt ends with the beginning of reasoning."""
    return prompt.rstrip().endswith(BEGIN)
