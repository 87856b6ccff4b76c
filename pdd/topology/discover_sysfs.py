"""Before any request: what a machine has, read from its sysfs: GPUs, NICs, NUMA nodes, and where each is plugged in.

Files that are missing, empty or refuse to be read are normal (virtual machines hide much); what they would have said is
then unknown. Formats: Documentation/ABI/testing/sysfs-bus-pci, sysfs-class-net and sysfs-class-infiniband of Linux.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from enum import StrEnum
from itertools import chain
from pathlib import Path

import msgspec

from pdd.base.errors import OperatorError

SYSFS = Path("/sys")
MAX_CPUS = 8192
"""CONFIG_NR_CPUS of the largest kernels."""
_NODE = re.compile(r"node\d{1,6}")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_FUNCTION = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_AMAZON = "0x1d0f"
_GPU_CLASSES = {"0x10de": ("0x0300", "0x0302"), "0x1002": ("0x0302", "0x0380", "0x1200")}
"""By vendor, the beginnings of PCI classes that compute. AMD's VGA controllers (0x0300) are mostly part of a CPU."""
_ETHERNET = "1"
"""ARPHRD_ETHER of linux/if_arp.h."""
_ACTIVE = "4"
"""IB_PORT_ACTIVE: how a port's state begins when it carries traffic."""
_LINE_CODE = 128 / 130
"""What PCIe leaves of the bit rate, from 8 GT/s on."""

Core = tuple[int, ...]
"""A physical core: the CPU numbers of its hardware threads."""


class NicKind(StrEnum):
    EFA = "efa"
    VERBS = "verbs"
    ETHERNET = "ethernet"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    path: tuple[str, ...] = ()
    """From the host bridge down to the function: (pci0000:44, 0000:44:00.0, 0000:45:00.0); empty: not known."""
    numa_node: int | None = None

    @property
    def address(self) -> str:
        """Of the PCI function."""
        return self.path[-1] if self.path else ""


class Nic(Device, frozen=True, kw_only=True):
    name: str
    """Of the RDMA device, or of the network interface where it is none."""
    kind: NicKind
    interface: str | None
    """The network interface that has its IP addresses: its own, or the bond or bridge that this one is part of."""
    gigabits_per_s: float | None = None
    """What its port and its PCIe link both can; None: neither is known."""


class NumaNode(msgspec.Struct, frozen=True):
    number: int
    cores: tuple[Core, ...]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    gpus: tuple[Device, ...]
    """By PCI address, which is CUDA's order with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    nics: tuple[Nic, ...]
    """Those that are up, by PCI address; virtual ones are left out."""
    numa_nodes: tuple[NumaNode, ...]
    """Those with CPUs; there is at least one."""
    left_out: tuple[str, ...]
    """NICs that were found and are not in `nics`, and why."""


def read_machine(sysfs: Path = SYSFS) -> Machine:
    """Raises OperatorError where `sysfs` is no sysfs."""
    if not (sysfs / "devices").is_dir():
        raise OperatorError(f"{sysfs}: no sysfs: there is no directory `devices` in it")
    found = [*_rdma_nics(sysfs), *_ethernet_nics(sysfs)]
    nics = [nic for nic in found if isinstance(nic, Nic)]
    return Machine(
        gpus=tuple(sorted(_gpus(sysfs), key=lambda gpu: gpu.address)),
        nics=tuple(sorted(nics, key=lambda nic: (nic.address, nic.name))),
        numa_nodes=numa_nodes(sysfs),
        left_out=tuple(nic for nic in found if isinstance(nic, str)),
    )


def restricted(machine: Machine, cpus: Collection[int]) -> Machine:
    """The machine with these CPUs alone: what a process in a container may use of it."""
    nodes = [
        NumaNode(node.number, tuple(kept for core in node.cores if (kept := tuple(c for c in core if c in cpus))))
        for node in machine.numa_nodes
    ]
    return msgspec.structs.replace(machine, numa_nodes=tuple(node for node in nodes if node.cores))


def numa_nodes(sysfs: Path = SYSFS) -> tuple[NumaNode, ...]:
    """The nodes that have CPUs. A kernel that knows of none has one, with all CPUs."""
    cpus = sysfs / "devices/system/cpu"
    lists = {
        int(directory.name.removeprefix("node")): cpu_list(_text(directory / "cpulist"))
        for directory in (sysfs / "devices/system/node").glob("node[0-9]*")
        if _NODE.fullmatch(directory.name)
    }
    if not any(lists.values()):
        lists = {0: cpu_list(_text(cpus / "online")) or [0]}
    taken: set[int] = set()
    nodes = [NumaNode(number, _cores(cpus, numbers, taken)) for number, numbers in sorted(lists.items())]
    return tuple(node for node in nodes if node.cores)


def cpu_list(text: str) -> list[int]:
    """`0-2,8` to [0, 1, 2, 8]; nothing where the text is no such list, or one of more CPUs than Linux can have."""
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        return []
    ends = [part.partition("-") for part in text.split(",")]
    ranges = [range(int(first), int(last or first) + 1) for first, _, last in ends]
    if any(each.stop > MAX_CPUS for each in ranges):
        return []
    return sorted(set(chain.from_iterable(ranges)))


def _cores(cpus: Path, numbers: list[int], taken: set[int]) -> tuple[Core, ...]:
    """Adds to `taken`: no CPU is in two cores, or in two nodes, whatever the files say."""
    cores: list[Core] = []
    free = set(numbers) - taken
    for number in numbers:
        if number not in free:
            continue
        siblings = cpu_list(_text(cpus / f"cpu{number}/topology/thread_siblings_list"))
        core = tuple(sibling for sibling in siblings if sibling in free)
        cores.append(core if number in core else (number,))
        free.difference_update(cores[-1])
    taken.update(numbers)
    return tuple(cores)


def _gpus(sysfs: Path) -> Iterator[Device]:
    for link in _entries(sysfs / "bus/pci/devices"):
        classes = _GPU_CLASSES.get(_text(link / "vendor"), ())
        if _text(link / "class").startswith(classes or "-") and not (link / "physfn").exists():
            yield Device(path=_path(link), numa_node=_numa_node(link))


def _rdma_nics(sysfs: Path) -> Iterator[Nic | str]:
    for link in _entries(sysfs / "class/infiniband"):
        function = link / "device"
        ports = [port for port in _entries(link / "ports") if _text(port / "state").startswith(_ACTIVE)]
        if (function / "physfn").exists():
            yield f"{link.name}: a virtual function of a NIC that is here itself"
        elif not ports:
            yield f"{link.name}: no port of it is active"
        else:
            interfaces = [entry.name for entry in _entries(function / "net")]
            yield Nic(
                name=link.name,
                kind=NicKind.EFA if _text(function / "vendor") == _AMAZON else NicKind.VERBS,
                interface=_owner(sysfs, interfaces[0]) if interfaces else None,
                gigabits_per_s=_slower(_number(_text(ports[0] / "rate")), _link_gigabits_per_s(function)),
                path=_path(function),
                numa_node=_numa_node(function),
            )


def _ethernet_nics(sysfs: Path) -> Iterator[Nic | str]:
    """Interfaces with hardware behind them that are not part of an RDMA NIC."""
    rdma = [link / "device/net" for link in _entries(sysfs / "class/infiniband")]
    for link in _entries(sysfs / "class/net"):
        function = _function_directory(link / "device")
        if not (link / "device").exists() or any((net / link.name).exists() for net in rdma):
            continue
        if _text(link / "type") != _ETHERNET or _text(link / "operstate") not in {"up", "unknown"}:
            yield f"{link.name}: not an Ethernet interface that is up"
            continue
        megabits_per_s = _number(_text(link / "speed"))
        yield Nic(
            name=link.name,
            kind=NicKind.ETHERNET,
            interface=_owner(sysfs, link.name),
            gigabits_per_s=_slower(megabits_per_s and megabits_per_s / 1000, _link_gigabits_per_s(function)),
            path=_path(link / "device"),
            numa_node=_numa_node(function),
        )


def _owner(sysfs: Path, interface: str) -> str:
    master = sysfs / "class/net" / interface / "master"
    return _resolved(master).name if master.exists() else interface


def _path(link: Path) -> tuple[str, ...]:
    parts = _resolved(link).parts
    first = next((i for i, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), len(parts))
    return tuple(part for i, part in enumerate(parts[first:]) if i == 0 or _FUNCTION.fullmatch(part))


def _function_directory(link: Path) -> Path:
    """Of the PCI function that a device stands behind: `0000:00:03.0` for `0000:00:03.0/virtio2`."""
    directory = _resolved(link)
    return next((path for path in (directory, *directory.parents) if _FUNCTION.fullmatch(path.name)), directory)


def _numa_node(function: Path) -> int | None:
    """The kernel writes -1 where firmware says nothing."""
    text = _text(function / "numa_node")
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None


def _link_gigabits_per_s(function: Path) -> float | None:
    """Virtual machines write `Unknown`, a speed of 0 or a width of 0, 63 or 255."""
    speed, width = _number(_text(function / "current_link_speed")), _number(_text(function / "current_link_width"))
    return speed * width * _LINE_CODE if speed and width and width <= 32 else None


def _slower(*rates: float | None) -> float | None:
    return min((rate for rate in rates if rate), default=None)


def _number(text: str) -> float | None:
    """The number that a text begins with, such as `400 Gb/sec (4X NDR)`; None: there is none above 0."""
    found = re.match(r"\d{1,9}(\.\d{1,9})?", text)
    return (float(found[0]) or None) if found else None


def _resolved(link: Path) -> Path:
    """The link itself where it leads round in a circle."""
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # Python 3.11 raises RuntimeError for a circle
        return link


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """Nothing where the file is missing, or its driver refuses (`speed` of an interface that is down)."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
