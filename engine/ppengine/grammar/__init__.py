"""The process that compiles grammars and computes masks of tokens; started by the core at the first structured output.

Everything that it has follows from grammars and tokens, so it may end at any time. The core replaces it.
"""
