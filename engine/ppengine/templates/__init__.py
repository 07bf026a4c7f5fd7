"""The process that renders chat templates and tokenizes long texts; started by its parent at the first of them.

A template is a program of the checkpoint's author: it has limits of time and memory, and can end no more than this
process, which the parent replaces. Tokens are made here so that a long prompt keeps no step of the engine waiting.
"""
