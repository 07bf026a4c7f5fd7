"""Tokens of the texts that consoles send: the core sees token ids alone."""
