"""Before any request: the rules between fields of a topology that no single field can break.

Pure: `problems` names what makes a topology unusable, `warnings` what is allowed but probably not meant, and
`check_local` what only the machine that runs a node can know.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import combinations, product

import msgspec

from pdd.base.errors import TopologyInvalid
from pdd.base.ids import NodeName
from pdd.topology.faults import KeyPath, dotted
from pdd.topology.model import Provider, Replica, Role, Topology
from pdd.topology.nics import nic_address, same_nics
from pdd.topology.run_dir import MAX_SOCKET_PATH_BYTES, run_dir, socket_path_bytes

VERSION = 1
"""The topology language that this pdd reads."""
MAX_PAGE_TOKENS = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_WILDCARDS = {"0.0.0.0", "::"}  # noqa: S104 - compared with, not listened on
MAX_NICS = 8
"""Of a rank; the C library has room for no more (native/pdd_port.h)."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One broken rule."""

    at: KeyPath
    text: str
    other: tuple[KeyPath, ...] = ()
    """Where the other side of a clash stands: the message ends with its line."""
    relies_on: tuple[KeyPath, ...] = ()
    """Further values that the rule looked at."""


def problems(topology: Topology) -> Iterator[Problem]:
    """Everything that makes the topology unusable."""
    yield from _cluster(topology)
    yield from _names(topology)
    yield from _ports(topology)
    yield from _roles(topology)
    yield from _http(topology)
    yield from _pages(topology)
    yield from _ranks(topology)
    yield from _nics(topology)
    yield from _progress_cores(topology)
    yield from _chunks(topology)
    yield from _hosts(topology)


def warnings(topology: Topology) -> list[str]:
    """What is allowed but probably not meant, one sentence each."""
    return [
        *_shared_cores(topology),
        *_crowded_progress_cores(topology),
        *_idle_threads(topology),
        *_unused_nics(topology),
        *_open_ports(topology),
    ]


def check_local(topology: Topology, node: NodeName) -> None:
    """What a daemon checks of its own node before it starts anything.

    Raises TopologyInvalid with one line a fault: an unknown node, cores that this machine does not have (or that this
    process may not use), NICs that it does not have or that are one, an admin socket whose path is too long for the
    system.
    """
    if node not in topology.nodes:
        raise TopologyInvalid(f"node {node} is not in the topology: it has {', '.join(topology.nodes)}")
    usable = os.sched_getaffinity(0)
    faults = [
        f"{dotted(path)}.{key}: core {core} is not usable here: {', '.join(map(str, sorted(usable)))} are"
        for path, replica in _replicas(topology)
        if path[1] == node
        for key, cores in (("cores", replica.cores), ("progress_cores", _all_progress_cores(replica)))
        for core in cores
        if core not in usable
    ]
    faults += [
        f"{dotted(path)}.nics: {fault}"
        for path, replica in _replicas(topology)
        if path[1] == node
        for fault in _nic_faults(replica, topology.fabric.provider)
    ]
    length_bytes = socket_path_bytes(run_dir(topology), node)
    if length_bytes > MAX_SOCKET_PATH_BYTES:
        text = f"the admin socket's path has {length_bytes} bytes, the system allows {MAX_SOCKET_PATH_BYTES}"
        faults.append(f"cluster.run_dir: {text}: name a shorter directory")
    if faults:
        raise TopologyInvalid("\n".join(faults))


def _all_progress_cores(replica: Replica) -> list[int]:
    """Each once, in order."""
    return sorted({core for cores in replica.progress_cores_by_rank or () for core in cores})


def _nic_faults(replica: Replica, provider: Provider) -> Iterator[str]:
    if provider is Provider.EFA:
        return  # they are no network interfaces: opening one tells whether it is there
    for nic in sorted({nic for nics in replica.nics_by_rank for nic in nics}):
        try:
            nic_address(nic)
        except TopologyInvalid as error:
            yield str(error)
    yield from same_nics(replica)


def _replicas(topology: Topology) -> Iterator[tuple[KeyPath, Replica]]:
    for name, node in topology.nodes.items():
        for index, replica in enumerate(node.replicas):
            yield ("nodes", name, "replicas", index), replica


def _cluster(topology: Topology) -> Iterator[Problem]:
    if topology.version != VERSION:
        yield Problem(at=("version",), text=f"{topology.version}: this pdd reads version {VERSION}")
    cluster = topology.cluster
    if not _NAME.fullmatch(cluster.name):
        yield Problem(at=("cluster", "name"), text=_NAME_RULE)
    if cluster.heartbeat_s >= cluster.silence_s:
        text = f"heartbeat_s {cluster.heartbeat_s:g} is not less than silence_s {cluster.silence_s:g}"
        yield Problem(
            at=("cluster", "heartbeat_s"),
            text=f"{text}: every peer would count as lost between two heartbeats",
            relies_on=(("cluster", "silence_s"),),
        )


_NAME_RULE = "a name is 1 to 63 letters, digits, `-`, `_` or `.`, and starts with a letter or digit"


def _names(topology: Topology) -> Iterator[Problem]:
    if not topology.nodes:
        yield Problem(at=("nodes",), text="no node: a topology has at least one")
    for name in topology.nodes:
        if not _NAME.fullmatch(name):
            yield Problem(at=("nodes", name), text=_NAME_RULE)


def _addresses(topology: Topology) -> Iterator[tuple[KeyPath, str, str, int]]:
    """(path, machine, host, port) of everything that is listened on."""
    for name, node in topology.nodes.items():
        yield ("nodes", name, "control_port"), node.machine, node.host, node.control_port
        if node.http is not None:
            yield ("nodes", name, "http", "port"), node.machine, node.http.host, node.http.port


def _ports(topology: Topology) -> Iterator[Problem]:
    first: dict[tuple[str, int], list[tuple[KeyPath, str]]] = {}
    for path, machine, host, port in _addresses(topology):
        address = "127.0.0.1" if host == "localhost" else host
        same = first.setdefault((machine, port), [])
        for other, other_address in same:
            if address == other_address or {address, other_address} & _WILDCARDS:
                text = f"port {port} of {host} is taken by {dotted(other)}"
                hosts = tuple((*p[:-1], "host") for p in (path, other))
                yield Problem(at=path, text=text, other=(other,), relies_on=hosts)
                break
        same.append((path, address))


def _roles(topology: Topology) -> Iterator[Problem]:
    by_role: dict[Role, list[KeyPath]] = {role: [] for role in Role}
    for path, replica in _replicas(topology):
        by_role[replica.role].append(path)
    relies_on = tuple(
        [("nodes",)]
        + [("nodes", name, "replicas") for name in topology.nodes]
        + [(*path, "role") for path, _ in _replicas(topology)]
    )
    if topology.nodes and not any(by_role.values()):
        yield Problem(at=("nodes",), text="no node has a replica: nothing would serve", relies_on=relies_on)
    for role, other, work in (
        (Role.DECODE, Role.PREFILL, "prefills for it: add a replica with role prefill, or make this one colocated"),
        (
            Role.PREFILL,
            Role.DECODE,
            "decodes what it prefills: add a replica with role decode, or make this one colocated",
        ),
    ):
        if by_role[role] and not by_role[other]:
            yield Problem(at=(*by_role[role][0], "role"), text=f"{role}, but no replica {work}", relies_on=relies_on)


def _http(topology: Topology) -> Iterator[Problem]:
    if topology.nodes and all(node.http is None for node in topology.nodes.values()):
        relies_on = tuple(("nodes", name, "http") for name in topology.nodes)
        text = "no node has http: clients could not reach the cluster; add `http: {port: 8000}` to one"
        yield Problem(at=("nodes",), text=text, relies_on=relies_on)


def _pages(topology: Topology) -> Iterator[Problem]:
    """Powers of two, so that of any two page sizes one divides the other: pages are cut and joined on the way."""
    for path, replica in _replicas(topology):
        tokens = replica.page_tokens
        if tokens > MAX_PAGE_TOKENS or tokens.bit_count() != 1:
            text = f"{tokens} is not a power of two from 1 to {MAX_PAGE_TOKENS}; 16 is usual"
            yield Problem(at=(*path, "page_tokens"), text=text)


def _ranks(topology: Topology) -> Iterator[Problem]:
    """What the file alone can tell; whether the model divides among the ranks is checked when it is known."""
    for path, replica in _replicas(topology):
        tp, dp, ep = replica.parallel.tp, replica.parallel.dp, replica.parallel.ep
        if ep not in (1, tp * dp):
            yield Problem(
                at=(*path, "parallel", "ep"),
                text=f"ep {ep} with tp {tp} and dp {dp}: experts are shared by all {tp * dp} ranks or by none (1)",
                relies_on=((*path, "parallel", "tp"), (*path, "parallel", "dp")),
            )
        if len(set(replica.cores)) != len(replica.cores):
            yield Problem(at=(*path, "cores"), text=f"{list(replica.cores)} names a core twice")


def _nics(topology: Topology) -> Iterator[Problem]:
    for path, replica in _replicas(topology):
        by_rank = replica.nics_by_rank
        if replica.nics == "auto":
            continue
        at = (*path, "nics")
        shape = ((*path, "parallel", "tp"), (*path, "parallel", "dp"))
        entries: tuple[KeyPath, ...] = tuple((*at, rank) for rank in range(len(by_rank)))
        tp, dp = replica.parallel.tp, replica.parallel.dp
        if len(by_rank) != tp * dp:
            text = f"{_number(len(by_rank), 'entry', 'entries')} for {_number(tp * dp, 'rank', 'ranks')}"
            yield Problem(at=at, text=f"{text} (tp {tp}, dp {dp}): write one for each", relies_on=(*shape, *entries))
            continue
        for rank, names in enumerate(by_rank):
            twice = next((name for name in names if names.count(name) > 1), None)
            if len(names) != len(by_rank[0]):
                numbers = f"rank {rank} has {_number(len(names), 'NIC', 'NICs')}, rank 0 has {len(by_rank[0])}"
                yield Problem(at=(*at, rank), text=f"{numbers}: every rank has as many", relies_on=entries)
            elif not names:
                yield Problem(at=(*at, rank), text=f"rank {rank} has no NIC: name at least one, or write `nics: auto`")
            elif len(names) > MAX_NICS:
                yield Problem(at=(*at, rank), text=f"rank {rank} has {len(names)} NICs: {MAX_NICS} at most")
            elif twice is not None:
                yield Problem(at=(*at, rank), text=f"rank {rank} names {twice} twice", relies_on=entries)
        if topology.fabric.provider is Provider.SHM:
            text = "provider shm uses no NIC: leave `nics` out, or use tcp"
            yield Problem(at=at, text=text, relies_on=(("fabric", "provider"),))


def _progress_cores(topology: Topology) -> Iterator[Problem]:
    """Ranks may share a core: their threads sleep most of the time."""
    for path, replica in _replicas(topology):
        by_rank = replica.progress_cores_by_rank
        if not by_rank:
            continue
        at = (*path, "progress_cores")
        shape = ((*path, "parallel", "tp"), (*path, "parallel", "dp"))
        entries: tuple[KeyPath, ...] = tuple((*at, rank) for rank in range(len(by_rank)))
        num_ranks = replica.parallel.num_ranks
        if len(by_rank) != num_ranks:
            text = f"{_number(len(by_rank), 'entry', 'entries')} for {_number(num_ranks, 'rank', 'ranks')}"
            yield Problem(at=at, text=f"{text}: write one for each, or `[]`", relies_on=(*shape, *entries))
            continue
        for rank, cores in enumerate(by_rank):
            if not cores:
                yield Problem(at=(*at, rank), text=f"rank {rank} has no core: name at least one")
            elif len(set(cores)) != len(cores):
                yield Problem(at=(*at, rank), text=f"{list(cores)} names a core twice")


def _number(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _hosts(topology: Topology) -> Iterator[Problem]:
    for name, node in topology.nodes.items():
        if node.host in _WILDCARDS:
            text = f"{node.host} is no address that peers can connect to: write the machine's own address"
            yield Problem(at=("nodes", name, "host"), text=text)
    machines = {node.machine for node in topology.nodes.values()}
    hosts: tuple[KeyPath, ...] = tuple(("nodes", name, "host") for name in topology.nodes)
    if "loopback" in machines and len(machines) > 1:
        text = "127.0.0.1 is another machine to each node: where nodes are on several, each needs an address of its own"
        local = next(name for name, node in topology.nodes.items() if node.machine == "loopback")
        yield Problem(at=("nodes", local, "host"), text=text, relies_on=hosts)
    if topology.fabric.provider is Provider.SHM and len(machines) > 1:
        text = "shm reaches only one machine, and the nodes are on several: use tcp"
        yield Problem(at=("fabric", "provider"), text=text, relies_on=hosts)
    if topology.fabric.provider is Provider.VERBS:
        yield from _no_rdma_address(topology)


def _no_rdma_address(topology: Topology) -> Iterator[Problem]:
    """Nodes where a replica would open a verbs port on the loopback interface."""
    text = "verbs needs the address of an RDMA NIC, and loopback has none: write it here, or list the `nics`"
    for name, node in topology.nodes.items():
        nics: list[KeyPath] = [
            ("nodes", name, "replicas", index, "nics")
            for index, replica in enumerate(node.replicas)
            if replica.nics == "auto"
        ]
        if nics and node.machine == "loopback":
            yield Problem(at=("nodes", name, "host"), text=text, relies_on=(("fabric", "provider"), *nics))


def _chunks(topology: Topology) -> Iterator[Problem]:
    for path, replica in _replicas(topology):
        if replica.chunk_tokens < replica.page_tokens <= MAX_PAGE_TOKENS:
            text = f"chunk_tokens {replica.chunk_tokens} is less than page_tokens {replica.page_tokens}"
            yield Problem(
                at=(*path, "chunk_tokens"),
                text=f"{text}: a chunk fills at least one page",
                relies_on=((*path, "page_tokens"),),
            )


def _shared_cores(topology: Topology) -> Iterator[str]:
    for (path, replica), (other_path, other) in combinations(_replicas(topology), 2):
        shared = sorted(set(replica.cores) & set(other.cores))
        if shared and _same_machine(topology, path, other_path):
            cores = ", ".join(map(str, shared))
            yield f"{dotted(other_path)} and {dotted(path)} share core {cores}: each will slow the other down"


def _crowded_progress_cores(topology: Topology) -> Iterator[str]:
    for (path, replica), (other_path, other) in product(_replicas(topology), repeat=2):
        shared = sorted(set(_all_progress_cores(replica)) & set(other.cores))
        if shared and _same_machine(topology, path, other_path):
            cores = ", ".join(map(str, shared))
            owner = "its" if path == other_path else f"{dotted(other_path)}'s"
            yield f"{dotted(path)}: {owner} executors run on progress core {cores}: pages will arrive late"


def _same_machine(topology: Topology, path: KeyPath, other: KeyPath) -> bool:
    one, two = (topology.nodes[NodeName(str(of[1]))] for of in (path, other))
    return one.machine == two.machine


def _idle_threads(topology: Topology) -> Iterator[str]:
    for path, replica in _replicas(topology):
        if replica.threads is not None and replica.cores and replica.threads > len(replica.cores):
            yield f"{dotted(path)}: {replica.threads} threads on {len(replica.cores)} cores will wait for each other"


def _unused_nics(topology: Topology) -> Iterator[str]:
    for path, replica in _replicas(topology):
        if replica.role is not Role.COLOCATED:
            continue
        for key, value in (("nics", replica.nics), ("progress_cores", replica.progress_cores)):
            if value != "auto":
                yield f"{dotted(path)}: a colocated replica hands nothing over: its {key} are not used"


def _open_ports(topology: Topology) -> Iterator[str]:
    for name, node in topology.nodes.items():
        http = node.http
        if http is None:
            continue
        local = http.host.startswith("127.") or http.host in {"localhost", "::1"}
        if not local and http.api_key_file is None:
            yield f"nodes.{name}.http: reachable from other machines without an API key: set api_key_file"
    for path, _, _, port in _addresses(topology):
        if port < 1024:
            yield f"{dotted(path)}: port {port} needs root or CAP_NET_BIND_SERVICE"
