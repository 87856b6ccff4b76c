"""An executor's place on its machine: the cores that it runs on, and the NUMA node that its arena's memory comes from.

The executor is pinned before it starts a thread or takes memory, so what it touches first itself (weights that it
converts, buffers) comes from its own node. The arena does not follow from that: its pages are first touched by whoever
writes them first, which on a decoder is the daemon, as the pages of others arrive. So the node is written into the
shared memory itself, where it holds for every process that maps it.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection, Iterable

from pdd.base.errors import OperatorError
from pdd.topology.discover_sysfs import NumaNode

_MPOL_PREFERRED = 1
"""linux/mempolicy.h: from this node while it has free memory, else from another."""
_MPOL_F_ADDR = 2
_SYSTEM_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""Numbers of mbind and get_mempolicy (mbind(2)); the C library has no functions for them."""
_MASK_BITS = 1024

_Mask = ctypes.c_ulong * (_MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong)))
_libc = ctypes.CDLL(None, use_errno=True)


def pin(replica: str, cores: Collection[int]) -> None:
    """The calling thread, and with it those that it starts. Raises OperatorError."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise OperatorError(
            f"{replica}: cannot run on cores {list(cores)}: {error.strerror}; "
            f"this machine allows {sorted(os.sched_getaffinity(0))}"
        ) from error


def node_of(cpus: Collection[int], nodes: Iterable[NumaNode]) -> int | None:
    """The node that has all these CPUs; None: none has, or there is no other."""
    nodes = tuple(nodes)
    homes = [node.number for node in nodes if {cpu for core in node.cores for cpu in core}.issuperset(cpus)]
    return homes[0] if homes and len(nodes) > 1 else None


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Pages of shared memory that nobody has touched yet will come from `node`, whoever touches them.

    Returns whether the system took it: one that does not serves pages as before, from where they are touched.
    """
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None or not 0 <= node < _MASK_BITS:
        return False
    mask = _Mask()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] |= 1 << node % bits
    # The kernel reads one bit less than it is told (mbind(2), BUGS), so it is told one more.
    return _call(numbers[0], address, num_bytes, _MPOL_PREFERRED, ctypes.byref(mask), _MASK_BITS + 1, 0) == 0


def preferred_node(address: int) -> int | None:
    """What `prefer_node` said of the shared memory at `address`, through any mapping of it; None: nothing."""
    numbers = _SYSTEM_CALLS.get(platform.machine())
    mode, mask = ctypes.c_int(), _Mask()
    if numbers is None:
        return None
    failed = _call(numbers[1], ctypes.byref(mode), ctypes.byref(mask), _MASK_BITS + 1, address, _MPOL_F_ADDR)
    bits = int.from_bytes(bytes(mask), "little")
    return bits.bit_length() - 1 if not failed and mode.value == _MPOL_PREFERRED and bits else None


def _call(number: int, *arguments: object) -> int:
    """System call with integers and pointers of a register's width each."""
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in (number, *arguments)]
    return int(_libc.syscall(*wide))
