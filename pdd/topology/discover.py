"""Before any request: which NICs and which CPU cores each rank of a machine should use. Pure.

A GPU's data crosses the fewest bridges to the NICs that share the longest part of its PCI path; where none shares even
the host bridge (virtual machines hide the tree), the NICs of its NUMA node are taken, else all. GPUs whose nearest NICs
are the same divide them evenly, in the order of their addresses. This is a proposal: the topology file decides.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from pdd.topology.discover_sysfs import Core, Device, Machine, Nic, NicKind

T = TypeVar("T")

_CPU = Device()
"""What a rank without a GPU computes on: it is near to everything alike."""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    device: Device | None
    """Its GPU; None: it computes on CPUs."""
    nics: tuple[Nic, ...]
    cores: tuple[Core, ...]
    """Of its executor. Every rank has as many, so that an even split of all of them gives each its own. Empty: too
    few."""
    progress_core: Core
    """Of its progress threads, near its NICs; empty: none is left for them."""


def propose(machine: Machine) -> tuple[Rank, ...]:
    """A rank for each GPU, in the order of `machine.gpus`; one for the CPUs where there is none."""
    devices = machine.gpus or (_CPU,)
    nics = _nics(devices, usable_nics(machine))
    cores, progress = _cores(machine, devices, nics)
    return tuple(
        Rank(device=device if machine.gpus else None, nics=own, cores=cores[rank], progress_core=progress[rank])
        for rank, (device, own) in enumerate(zip(devices, nics, strict=True))
    )


def usable_nics(machine: Machine) -> tuple[Nic, ...]:
    """Of one kind, RDMA before Ethernet, and none that is slower than half of the fastest.

    Machines have RDMA NICs for other purposes. Those that manage a p6-b200's NVSwitches are ConnectX-7 with active
    ports next to the GPUs, and only their narrow PCIe links tell. A bond's interfaces are one NIC.
    """
    rdma = [nic for nic in machine.nics if nic.kind is not NicKind.ETHERNET]
    nics = _fast(_by_interface(rdma or machine.nics))
    if not nics:
        return ()
    (kind, _), *_ = Counter(nic.kind for nic in nics).most_common()
    return tuple(nic for nic in nics if nic.kind is kind)


def _fast(nics: Iterable[Nic]) -> list[Nic]:
    nics = list(nics)
    fastest = max((nic.gigabits_per_s or 0 for nic in nics), default=0)
    return [nic for nic in nics if nic.gigabits_per_s is None or nic.gigabits_per_s * 2 >= fastest]


def _by_interface(nics: Iterable[Nic]) -> list[Nic]:
    first: dict[str, Nic] = {}
    for nic in nics:
        first.setdefault(nic.interface or nic.name, nic)
    return list(first.values())


def nearest(device: Device, nics: Sequence[Nic]) -> tuple[Nic, ...]:
    shared = [_num_shared(device.path, nic.path) for nic in nics]
    if most := max(shared, default=0):
        return tuple(nic for nic, number in zip(nics, shared, strict=True) if number == most)
    of_node = tuple(nic for nic in nics if nic.numa_node is not None and nic.numa_node == device.numa_node)
    return of_node or tuple(nics)


def _num_shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _nics(devices: Sequence[Device], nics: Sequence[Nic]) -> list[tuple[Nic, ...]]:
    """For each device its NICs; as many for each, for the topology wants that of a replica's ranks."""
    if not any(device.path for device in devices):
        nics = sorted(nics, key=lambda nic: -(nic.gigabits_per_s or 0))[: len(devices)]
    shares = _divide([nearest(device, nics) for device in devices])
    least = min(map(len, shares))
    return [share[:least] for share in shares]


def _divide(groups: Sequence[tuple[T, ...]]) -> list[tuple[T, ...]]:
    """Members of equal groups divide what is in it."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    return [_share(group, members[group].index(index), len(members[group])) for index, group in enumerate(groups)]


def _share(items: tuple[T, ...], index: int, number: int) -> tuple[T, ...]:
    """An even, contiguous part; where there are fewer than `number`, neighbours share one."""
    if len(items) < number:
        return items[index * len(items) // number :][:1]
    size = len(items) // number
    return items[index * size : (index + 1) * size]


def _cores(
    machine: Machine, devices: Sequence[Device], nics: Sequence[tuple[Nic, ...]]
) -> tuple[list[tuple[Core, ...]], list[Core]]:
    """For each rank the cores of its executor, on its device's NUMA node, and the core for its progress threads, on its
    NICs' node: one of the last there. No rank gets the latter where an executor would be left without a core."""
    pools = {node.number: node.cores for node in machine.numa_nodes}
    pools[-1] = tuple(core for cores in pools.values() for core in cores)
    known = all(device.numa_node in pools for device in devices)
    home = [device.numa_node if known and device.numa_node is not None else -1 for device in devices]
    near = [own[0].numa_node if own else None for own in nics]
    wanted = [node if node in pools else home[rank] for rank, node in enumerate(near)]
    if progress := _last_cores(pools, [-1 if node is None else node for node in wanted]):
        free = {number: tuple(core for core in cores if core not in progress) for number, cores in pools.items()}
        if executors := _divide_cores([free[number] for number in home]):
            return executors, progress
    return _divide_cores([pools[number] for number in home]) or [()] * len(devices), [()] * len(devices)


def _last_cores(pools: Mapping[int, tuple[Core, ...]], wanted: Iterable[int]) -> list[Core]:
    """A core of its own from each pool that is wanted; nothing where there are too few."""
    taken: list[Core] = []
    for number in wanted:
        left = [core for core in pools[number] if core not in taken]
        if not left:
            return []
        taken.append(left[-1])
    return taken


def _divide_cores(groups: Sequence[tuple[Core, ...]]) -> list[tuple[Core, ...]]:
    """As many for each; nothing where somebody would have none."""
    if any(len(group) < number for group, number in Counter(groups).items()):
        return []
    shares = _divide(groups)
    least = min(map(len, shares))
    return [share[:least] for share in shares]
