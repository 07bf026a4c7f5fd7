"""Threads that run behind others."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from ppengine.common.thread_priority import NICE, yield_to_others


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_one_thread_yields_and_its_process_does_not() -> None:
    usual = priority()
    with ThreadPoolExecutor(1, initializer=yield_to_others) as pool:
        assert pool.submit(priority).result() == max(usual, NICE)
        assert priority() == usual

        def lower() -> int:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            yield_to_others()
            return priority()

        assert pool.submit(lower).result() == 19, "a priority is never raised"
