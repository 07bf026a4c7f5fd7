"""Defaults of sampling that the authors of a model give in generation_config.json, the fields that vLLM takes of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ppengine.checkpoint.special_tokens import read_optional
from ppengine.http.request_fields import CommonFields
from ppengine.protocol.sampling import SamplingParams

log = logging.getLogger("ppengine.http")

FILE = "generation_config.json"
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class SamplingDefaults:
    """Values for the fields that a request leaves out."""

    def __init__(self, folder: Path, *, used: bool) -> None:
        """Read those of the checkpoint in `folder`, if they are `used`. A wrong value is left out, with a line."""
        self._values: dict[str, Any] = {}
        given = read_optional(folder / FILE) if used else {}
        for name in _FIELDS:
            if (value := given.get(name)) is None:
                continue
            try:
                SamplingParams(**{name: value})
            except ValueError as error:
                log.warning("%s: %s; it is left out", FILE, error)
                continue
            self._values[name] = value
        if self._values:
            texts = [f"{name}={value}" for name, value in self._values.items()]
            log.info("%s: requests without a value have %s", FILE, ", ".join(texts))

    def fill(self, request: CommonFields) -> None:
        """Give a request the values that it leaves out."""
        for name, value in self._values.items():
            if getattr(request, name) is None:
                setattr(request, name, value)
