"""Who may look into a process of ours: its frames are the best evidence there is of where it stands."""

from __future__ import annotations

import ctypes

_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


def allow() -> None:
    """Let processes of this user trace this one (py-spy, a debugger), also where Yama reserves that to its parents."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
