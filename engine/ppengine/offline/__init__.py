"""The offline API: an engine as a Python object. `from ppengine import LLM, SamplingParams`."""
