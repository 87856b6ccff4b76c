"""Before any request: a proposal as the text of a topology file, to be changed where it says CHANGE. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence

import yaml

from pdd.topology.discover import Rank
from pdd.topology.discover_sysfs import Core, Machine, Nic, NicKind
from pdd.topology.model import Provider, Role

_HOSTS = {"this machine": "192.0.2.10", "another machine of the same kind": "192.0.2.20"}
"""Addresses for documentation (RFC 5737)."""
_HERE, _THERE = _HOSTS


def topology_text(
    machine: Machine, ranks: Sequence[Rank], role: Role, providers: Collection[str] = tuple(Provider)
) -> str:
    """A file that loads. A prefiller needs a decoder and the other way round: its twin on a machine of the same kind.

    providers: those that there are; NICs that none of them drives are proposed in comments.
    """
    nodes = {
        Role.PREFILL: ((Role.PREFILL, _HERE), (Role.DECODE, _THERE)),
        Role.DECODE: ((Role.PREFILL, _THERE), (Role.DECODE, _HERE)),
        Role.COLOCATED: ((Role.COLOCATED, _HERE),),
    }[role]
    provider = _provider(ranks, providers)
    lines = [*_head(machine, ranks), "", "nodes:"]
    if role is not Role.COLOCATED and provider is not None:
        lines[-1:-1] = ["fabric:", f"  provider: {provider}", ""]
    for of, where in nodes:
        lines += _node(of, where, ranks, provider)
    return "\n".join(lines) + "\n"


def _provider(ranks: Sequence[Rank], providers: Collection[str]) -> str | None:
    """What drives the NICs: their own provider, or tcp where they have interfaces. None: nothing that there is."""
    nics = [nic for rank in ranks for nic in rank.nics]
    own = nics[0].kind.value if nics else ""
    if own in providers:
        return own
    return Provider.TCP.value if all(nic.interface for nic in nics) else None


def _head(machine: Machine, ranks: Sequence[Rank]) -> Iterator[str]:
    used = {nic for rank in ranks for nic in rank.nics}
    yield "# Proposed by `pdctl topology discover`: change what is marked CHANGE, then run `pdctl topology check`."
    yield "#"
    yield f"# GPUs: {len(machine.gpus)}; NUMA nodes: {' '.join(str(node.number) for node in machine.numa_nodes)}"
    for nic in machine.nics:
        yield f"# {'used' if nic in used else 'not used'}: {_described(nic)}"
    for reason in machine.left_out:
        yield f"# not used: {_printable(reason)}"
    yield "version: 1"
    yield ""
    yield "cluster:"
    yield "  # CHANGE: the same secret on every machine; `pdd up` makes it where there is none."
    yield "  key_file: cluster.key"
    yield ""
    yield "model:"
    yield "  # CHANGE: what clients write in `model`; a Hugging Face directory or a .gguf file."
    yield "  name: model"
    yield "  path: model"
    yield f"  dtype: {'bfloat16' if machine.gpus else 'float32'}"


def _described(nic: Nic) -> str:
    rate = f", {nic.gigabits_per_s:.0f} Gbit/s" if nic.gigabits_per_s else ""
    node = "" if nic.numa_node is None else f", NUMA node {nic.numa_node}"
    interface = f" ({nic.interface})" if nic.interface not in {None, nic.name} else ""
    return _printable(f"{nic.name}{interface}: {nic.kind}, {nic.address or 'no PCI address'}{node}{rate}")


def _node(role: Role, where: str, ranks: Sequence[Rank], provider: str | None) -> Iterator[str]:
    yield f"  {role}0:"
    if role is not Role.COLOCATED:
        yield f"    # CHANGE: the address of {where} in the network of the daemons."
        yield f"    host: {_HOSTS[where]}"
    yield "    control_port: 7411"
    if role is not Role.PREFILL:
        yield "    # CHANGE: where clients connect; other than 127.0.0.1 with an api_key_file."
        yield "    http: {host: 127.0.0.1, port: 8000}"
    yield "    replicas:"
    yield f"      - role: {role}"
    if len(ranks) > 1:
        yield f"        parallel: {{tp: {len(ranks)}}}"
        yield from (f"        # rank {number}: {_device(rank)}" for number, rank in enumerate(ranks))
    if role is not Role.COLOCATED and all(rank.nics for rank in ranks):
        yield from _nics(ranks, provider)
    if all(rank.cores for rank in ranks):
        yield "        cores: ["
        yield from (f"          {_cpus(rank.cores)},  # rank {number}" for number, rank in enumerate(ranks))
        yield "        ]"
        yield f"        threads: {len(ranks[0].cores)}"
    if role is not Role.COLOCATED and all(rank.progress_core for rank in ranks):
        yield f"        progress_cores: [{', '.join(f'[{_cpus([rank.progress_core])}]' for rank in ranks)}]"
    yield "        # CHANGE: the KV memory of each rank."
    yield "        kv_bytes: 1 GiB"


def _nics(ranks: Sequence[Rank], provider: str | None) -> Iterator[str]:
    comment = ""
    if provider is None:
        yield f"        # This pdd has no provider for these NICs ({ranks[0].nics[0].kind}); with one it would be:"
        comment = "# "
    yield f"        {comment}nics:"
    for number, rank in enumerate(ranks):
        names = ", ".join(_quoted(_name(nic, provider)) for nic in rank.nics)
        yield f"        {comment}  - [{names}]  # rank {number}"


def _name(nic: Nic, provider: str | None) -> str:
    """TCP and verbs bind the address of a network interface; EFA has none."""
    wants_interface = nic.kind is not NicKind.EFA or provider == Provider.TCP
    return nic.interface if nic.interface and wants_interface else nic.name


def _device(rank: Rank) -> str:
    if rank.device is None:
        return "CPUs"
    node = rank.device.numa_node
    return f"GPU {rank.device.address}" + ("" if node is None else f" on NUMA node {node}")


def _cpus(cores: Sequence[Core]) -> str:
    """The first hardware threads, then the second ones."""
    return ", ".join(str(cpu) for cpu in sorted(cpu for core in cores for cpu in core))


def _quoted(name: str) -> str:
    """As YAML takes it for a text."""
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", name) and yaml.safe_load(name) == name
    return name if plain else json.dumps(name)


def _printable(text: str) -> str:
    """A name may hold anything but a slash and white space; a comment ends with its line."""
    return "".join(character if character.isprintable() else "?" for character in text)
