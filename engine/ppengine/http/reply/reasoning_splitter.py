"""Reasoning in front of a reply: `<think>...</think>`, or `[THINK]...[/THINK]`."""

from __future__ import annotations

from typing import NamedTuple

from ppengine.http.reply.growing_parser import GrowingParser, Step


class Tags(NamedTuple):
    """Texts around reasoning."""

    begin: str
    end: str


TAGS = {"think": Tags("<think>", "</think>"), "mistral": Tags("[THINK]", "[/THINK]")}
"""Tags by the names that `http.reasoning` takes."""


class ReasoningSplitter(GrowingParser):
    """Gives out reasoning, then text. `inside`: the prompt ends with the beginning of the reasoning."""

    def __init__(self, tags: Tags, *, inside: bool) -> None:
        super().__init__()
        self._tags, self._inside = tags, inside

    def parse(self) -> Step[None]:
        """Parse reasoning if the text begins with it, then text."""
        yield from self.space()
        if self._inside or (yield from self.accept(self._tags.begin)):
            yield from self.space()
            self.give("reasoning", "")
            if (yield from self.text_until((self._tags.end,), "reasoning")):
                yield from self.space()
                self.give("reasoning", "")
        yield from self.text_until(())


def begins_inside(prompt: str, begun: str, tags: Tags) -> bool:
    """Return whether an answer begins inside of reasoning: by the end of the prompt, or of its text that is `begun`."""
    return prompt.rstrip().endswith(tags.begin) or begun.rfind(tags.begin) > begun.rfind(tags.end)
