"""The process that renders chat templates, within limits of time and memory; started by the core at the first chat.

A template is a program of the checkpoint's author. Here it can end no more than this process, which the core replaces.
"""
