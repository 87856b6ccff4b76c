"""Small sysfs trees of known machines, for tests of topology discovery: what it reads, and nothing else.

Where the figures are from:
- P5EN, P6_B200, P4D: public hwloc dumps of these AWS instances (aws-ofi-nccl, tests/unit/fixtures/topology): addresses,
  bridges, NUMA nodes, link speeds, cores.
- P5: addresses and NUMA nodes from a public hwloc dump of a p5.48xlarge; bridges as in P5EN.
- G6: eight L4 and one EFA NIC as AWS documents them; addresses invented.
- DGX_H100: NVIDIA's DGX H100 user guide (interfaces, RDMA devices, which GPU each belongs to); bridges invented.
- HGX_H200: a dump in a public NCCL issue (four NUMA nodes; the first four switches), the second socket built alike.
- AZURE_ND_H100: Azure's static map of ND H100 v5 (azhpc-images, ndv5-topo.xml).
- LAPTOP, BARE: invented.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_NVIDIA, _AMAZON, _MELLANOX, _INTEL, _AMD = "0x10de", "0x1d0f", "0x15b3", "0x8086", "0x1002"


class Function(NamedTuple):
    """A PCI function and what the kernel made of it."""

    path: str
    """Below /sys/devices."""
    vendor: str
    kind: str
    """PCI class."""
    numa_node: int = -1
    link: str = "Unknown 0"
    """GT/s PCIe and width."""
    rdma: str = ""
    rate: str = ""
    """Of the RDMA port."""
    state: str = "4: ACTIVE"
    interface: str = ""
    speed: str = ""
    operstate: str = "up"


class Tree(NamedTuple):
    functions: list[Function]
    nodes: dict[int, str]
    """CPU lists by NUMA node."""
    sibling_distance: int
    """CPU n and n + this are threads of a core; 0: each CPU is a core."""
    virtual: tuple[str, ...] = ("lo", "docker0", "veth1a2b")


def build(root: Path, tree: Tree) -> Path:
    """Write the tree; returns `root`, to be read as /sys."""
    for function in tree.functions:
        _write_function(root, function)
    for name in tree.virtual:
        _write_interface(root, root / "devices/virtual/net" / name, "unknown", "")
    for number, cpus in tree.nodes.items():
        _write(root / f"devices/system/node/node{number}/cpulist", cpus)
        for cpu in _numbers(cpus) if tree.sibling_distance else ():
            first = cpu % tree.sibling_distance
            siblings = f"{first},{first + tree.sibling_distance}"
            _write(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    return root


def _write_function(root: Path, function: Function) -> None:
    directory = root / "devices" / function.path
    speed, width = function.link.split()
    words = {"vendor": function.vendor, "class": function.kind, "numa_node": str(function.numa_node),
             "current_link_speed": speed if speed == "Unknown" else f"{speed} GT/s PCIe",
             "current_link_width": width}  # fmt: skip
    for name, text in words.items():
        _write(directory / name, text)
    _link(root / "bus/pci/devices" / directory.name, directory)
    if function.rdma:
        _write(directory / "infiniband" / function.rdma / "ports/1/state", function.state)
        _write(directory / "infiniband" / function.rdma / "ports/1/rate", function.rate)
        _link(directory / "infiniband" / function.rdma / "device", directory)
        _link(root / "class/infiniband" / function.rdma, directory / "infiniband" / function.rdma)
    if function.interface:
        interface = directory / "net" / function.interface
        _write_interface(root, interface, function.operstate, function.speed)
        _link(interface / "device", directory)


def _write_interface(root: Path, directory: Path, operstate: str, speed: str) -> None:
    _write(directory / "operstate", operstate)
    _write(directory / "type", "772" if directory.name == "lo" else "32" if directory.name.startswith("ib") else "1")
    if speed:
        _write(directory / "speed", speed)
    _link(root / "class/net" / directory.name, directory)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _numbers(cpus: str) -> list[int]:
    ends = [part.split("-") for part in cpus.split(",")]
    return [number for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1)]


# ---- AWS ----


def _nitro(first: int, bus: int) -> str:
    """A device below the PCIe switch whose host bridge is bus `first`: host bridge, upstream port, two levels of switch
    ports, device. Port n of the lowest level leads to bus `first + 3 + n`."""
    port = bus - first - 3
    bridges = f"0000:{first:02x}:00.0/0000:{first + 1:02x}:00.0/0000:{first + 2:02x}:{port // 8:02x}.{port % 8}"
    return f"pci0000:{first:02x}/{bridges}/0000:{bus:02x}:00.0"


def _efa(path: str, numa_node: int, link: str, rate: int) -> Function:
    bus, device = path[-7:-5], path[-4:-2]
    name = f"rdmap{int(bus, 16)}s{int(device, 16)}"
    return Function(path, _AMAZON, "0x020000", numa_node, link, rdma=name, rate=f"{rate} Gb/sec (4X HDR)")


def _ena(path: str, numa_node: int, name: str) -> Function:
    return Function(path, _AMAZON, "0x020000", numa_node, interface=name, speed="-1")


def _nvidia(path: str, numa_node: int) -> Function:
    return Function(path, _NVIDIA, "0x030200", numa_node, "32.0 16")


def _nitro_switch(first: int, numa_node: int, nics: range, gpus: range, link: str, rate: int) -> list[Function]:
    found = [_efa(_nitro(first, bus), numa_node, link, rate) for bus in nics]
    return found + [_nvidia(_nitro(first, bus), numa_node) for bus in gpus]


_192_CPUS = {0: "0-47,96-143", 1: "48-95,144-191"}

P5 = Tree(
    [
        function
        for index, first in enumerate(range(0x44, 0xCC, 0x11))
        for function in _nitro_switch(
            first, index // 4, range(first + 11, first + 15), range(first + 15, first + 16), "16.0 8", 100
        )
    ]
    + [_ena(_nitro(0x44, 0x47), 0, "enp71s0")],
    _192_CPUS,
    96,
)

P5EN = Tree(
    [
        function
        for first, nics, gpus, node in (
            (0x44, range(0x55, 0x59), range(0x59, 0x5B), 0),
            (0x5D, range(0x6E, 0x72), range(0x72, 0x74), 0),
            (0x76, range(0x87, 0x8B), range(0x8B, 0x8D), 1),
            (0x8F, range(0xA0, 0xA4), range(0xA4, 0xA6), 1),
        )
        for function in _nitro_switch(first, node, nics, gpus, "32.0 8", 200)
    ]
    + [_ena(_nitro(0x5D, bus), 0, f"enp{bus}s0") for bus in range(0x60, 0x64)],
    _192_CPUS,
    96,
)

P6_B200 = Tree(
    [
        function
        for first, nics, gpus, node in (
            (0x44, range(0x4F, 0x51), range(0x51, 0x53), 0),
            (0x55, range(0x60, 0x62), range(0x62, 0x64), 0),
            (0x66, range(0x71, 0x73), range(0x75, 0x77), 1),
            (0x79, range(0x84, 0x86), range(0x86, 0x88), 1),
        )
        for function in _nitro_switch(first, node, nics, gpus, "32.0 16", 400)
    ]
    # They manage the NVSwitches: active, next to the GPUs, and of no use to anybody else.
    + [
        Function(
            _nitro(0x66, bus),
            _MELLANOX,
            "0x020700",
            1,
            "32.0 1",
            rdma=f"ibp{bus}s0f0",
            rate="400 Gb/sec (4X NDR)",
            interface=f"ibp{bus}s0f0",
        )
        for bus in (0x73, 0x74)
    ]
    + [_ena(_nitro(0x44, 0x47), 0, "enp71s0"), _ena(_nitro(0x66, 0x69), 1, "enp105s0")],
    _192_CPUS,
    96,
)

P4D = Tree(
    [
        function
        for bus, node in ((0x10, 0), (0x20, 0), (0x90, 1), (0xA0, 1))
        for bridge in [f"pci0000:{bus:02x}/0000:{bus:02x}"]
        for function in (
            _efa(f"{bridge}:1b.0", node, "Unknown 0", 100),
            Function(f"{bridge}:1c.0", _NVIDIA, "0x030200", node, "16.0 16"),
            Function(f"{bridge}:1d.0", _NVIDIA, "0x030200", node, "16.0 16"),
        )
    ]
    + [_ena("pci0000:a0/0000:a0:01.0", 1, "ens161"), Function("pci0000:00/0000:00:03.0", _AMAZON, "0x030000")],
    {0: "0-23,48-71", 1: "24-47,72-95"},
    48,
)

G6 = Tree(
    [_nvidia(f"pci0000:00/0000:00:{device:02x}.0", -1) for device in range(0x10, 0x18)]
    + [_efa("pci0000:00/0000:00:1b.0", -1, "Unknown 0", 100), _ena("pci0000:00/0000:00:05.0", -1, "ens5")],
    _192_CPUS,
    96,
)


# ---- ConnectX-7 ----


def _connectx7(path: str, numa_node: int, name: str, interface: str, rate: int = 400) -> Function:
    return Function(path, _MELLANOX, "0x020700" if interface.startswith("ib") else "0x020000", numa_node, "32.0 16",
                    rdma=name, rate=f"{rate} Gb/sec (4X NDR)", interface=interface)  # fmt: skip


def _switch(bus: int, device: int) -> str:
    """Device below a PCIe switch with a host bridge of its own."""
    ports = f"0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
    return f"pci0000:{bus:02x}/{ports}/0000:{bus + 2:02x}:{device % 4:02x}.0/0000:{device:02x}:00.0"


_DGX_PAIRS = {0x1B: (0x18, 0), 0x43: (0x40, 3), 0x52: (0x4F, 4), 0x61: (0x5E, 5),
              0x9D: (0x9A, 6), 0xC3: (0xC0, 9), 0xD1: (0xCE, 10), 0xDF: (0xDC, 11)}  # fmt: skip
"""Bus of each GPU: bus of its NIC, number of its RDMA device."""

DGX_H100 = Tree(
    [
        function
        for gpu, (nic, number) in _DGX_PAIRS.items()
        for function in (
            _nvidia(_switch(nic - 3, gpu), int(gpu > 0x80)),
            _connectx7(_switch(nic - 3, nic), int(gpu > 0x80), f"mlx5_{number}", f"ibp{nic}s0"),
        )
    ]
    # NVSwitches: of NVIDIA, and no GPUs.
    + [Function(f"pci0000:00/0000:00:11.0/0000:{bus:02x}:00.0", _NVIDIA, "0x068000", 0) for bus in range(5, 9)]
    # Two ports each for storage, on the CPUs' own slots.
    + [
        _connectx7(f"pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.0/0000:{bus:02x}:00.{port}", node,
                   f"mlx5_{first + port}", f"{'enp' if port else 'ibp'}{bus}s0f{port}")
        for bus, node, first in ((0x29, 0, 1), (0xAA, 1, 7))
        for port in (0, 1)
    ]
    + [
        Function("pci0000:00/0000:0b:00.0", _INTEL, "0x020000", 0, "8.0 4", interface="eno3", speed="1000"),
    ],
    {0: "0-55,112-167", 1: "56-111,168-223"},
    112,
)  # fmt: skip

HGX_H200 = Tree(
    [
        function
        for number, (switch, gpu, nic, node) in enumerate(
            (
                *((0x15, 0x18, 0x19, 0), (0x26, 0x2A, 0x29, 0), (0x37, 0x3A, 0x3B, 0), (0x59, 0x5D, 0x5C, 1)),
                *((0x97, 0x9A, 0x9B, 2), (0xA8, 0xAB, 0xAC, 2), (0xB7, 0xBA, 0xBC, 2), (0xD9, 0xDD, 0xDC, 3)),
            )
        )
        for function in (
            _nvidia(_switch(switch, gpu), node),
            _connectx7(_switch(switch, nic), node, f"mlx5_{number}", f"enp{nic}s0np0"),
        )
    ]
    + [
        _connectx7("pci0000:48/0000:48:01.0/0000:49:00.0", 0, "mlx5_8", "enp73s0f0np0", rate=200),
        _connectx7("pci0000:48/0000:48:01.0/0000:49:00.1", 0, "mlx5_9", "enp73s0f1np1", rate=200)._replace(
            state="1: DOWN", operstate="down"
        ),
        Function("pci0000:00/0000:00:1c.0/0000:02:00.0", _INTEL, "0x020000", 0, interface="eno1", speed="1000"),
    ],
    {node: f"{24 * node}-{24 * node + 23},{96 + 24 * node}-{96 + 24 * node + 23}" for node in range(4)},
    96,
)


def _azure(numa: bool) -> Tree:
    def path(domain: int) -> str:
        bus = f"LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/00000000-{domain:04x}-8899-0000-000000000000"
        return f"{bus}/pci{domain:04x}:00/{domain:04x}:00:00.0"

    domains = (1, 2, 3, 8, 9, 10, 11, 12)
    nodes = [index // 4 if numa else -1 for index in range(8)]
    functions = [_nvidia(path(domain), node) for domain, node in zip(domains, nodes, strict=True)]
    functions += [
        _connectx7(path(0x101 + index), node, f"mlx5_ib{index}", f"ib{index}") for index, node in enumerate(nodes)
    ]
    # The virtual machine's own network is a virtual function of a slower NIC.
    functions.append(_connectx7(path(0xC05C), nodes[0], "mlx5_an0", "enP49244s1", rate=100))
    return Tree(functions, {0: "48-95", 1: "0-47"} if numa else {0: "0-95"}, 0)


AZURE_ND_H100 = _azure(numa=True)
AZURE_WITHOUT_NUMA = _azure(numa=False)


# ---- without GPUs ----

LAPTOP = Tree(
    [
        Function("pci0000:00/0000:00:02.0", _INTEL, "0x030000"),
        Function("pci0000:00/0000:00:08.1/0000:c1:00.0", _AMD, "0x030000", 0),
        Function("pci0000:00/0000:00:1f.6", _INTEL, "0x020000", interface="enp0s31f6", speed="", operstate="down"),
        Function("pci0000:00/0000:00:14.3", _INTEL, "0x028000", interface="wlp0s20f3", speed=""),
    ],
    {0: "0-7"},
    4,
)

BARE = Tree([], {}, 0, virtual=("lo",))
"""A container on one CPU without a network."""
