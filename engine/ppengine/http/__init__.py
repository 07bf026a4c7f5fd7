"""The process `http`: OpenAI's API on a port. It tokenizes and detokenizes; the core has token ids alone."""
