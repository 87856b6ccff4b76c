"""What a child process asks of the kernel."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def die_with_parent() -> None:
    """SIGTERM comes when the parent ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
