"""What a child process asks of the kernel."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def die_with_parent(number: signal.Signals) -> None:
    """That signal comes when the parent ends, however it ends. One other than SIGKILL waits while we are stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
