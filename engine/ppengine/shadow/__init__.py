"""The reference of the shadow check: the whole model as one stage, in a process of its own, started by the core.

`reference` repeats a request and judges its tokens; `__main__` is the process. It shares nothing with the stages but
the checkpoint: no transport, no prefix cache, no chunks of other requests beside its own.
"""
