"""A pipeline-parallel LLM engine: `from ppengine import LLM, SamplingParams`.

Names are imported when they are asked for, so that `ppengine.protocol` costs a console nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppengine.offline.launch import EngineError as EngineError
    from ppengine.offline.llm import LLM as LLM
    from ppengine.offline.llm_engine import LLMEngine as LLMEngine
    from ppengine.offline.request_output import CompletionOutput as CompletionOutput
    from ppengine.offline.request_output import RequestOutput as RequestOutput
    from ppengine.protocol.sampling import SamplingParams as SamplingParams
    from ppengine.protocol.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

_HOMES = {
    "LLM": "ppengine.offline.llm",
    "LLMEngine": "ppengine.offline.llm_engine",
    "CompletionOutput": "ppengine.offline.request_output",
    "RequestOutput": "ppengine.offline.request_output",
    "EngineError": "ppengine.offline.launch",
    "SamplingParams": "ppengine.protocol.sampling",
    "StructuredOutputsParams": "ppengine.protocol.structured_outputs",
}
__all__ = [
    "LLM", "CompletionOutput", "EngineError", "LLMEngine", "RequestOutput", "SamplingParams",
    "StructuredOutputsParams",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import one of the public names."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
