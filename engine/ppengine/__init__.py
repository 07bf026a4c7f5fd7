"""A pipeline-parallel LLM engine."""
