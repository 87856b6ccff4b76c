"""Before any request: the names of NICs in a topology to the addresses that a replica's fabric ports bind."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterator
from ipaddress import AddressValueError, IPv4Address

from pdd.base.errors import TopologyInvalid
from pdd.topology.model import Provider, Replica

_SIOCGIFADDR = 0x8915
"""ioctl: an interface's IPv4 address (netdevice(7))."""

_MAX_NAME_BYTES = 15
"""IFNAMSIZ, less the zero at the end."""


def port_hosts(replica: Replica, host: str, provider: Provider) -> tuple[tuple[str, ...], ...]:
    """For each rank of a replica of this machine what its port opens: the address of each of its NICs; `host` is the
    node's. EFA devices have no address of IP and go by their names. Raises TopologyInvalid."""
    if replica.nics == "auto":
        return ((host,),) * replica.parallel.num_ranks
    if provider is Provider.EFA:
        return replica.nics_by_rank
    return tuple(tuple(nic_address(nic) for nic in nics) for nics in replica.nics_by_rank)


def same_nics(replica: Replica) -> Iterator[str]:
    """A fault for each rank that names one address of this machine twice, such as `lo` and 127.0.0.1. NICs that are
    not here are left out."""
    for rank, nics in enumerate(replica.nics_by_rank):
        first: dict[str, str] = {}
        for nic in nics:
            with contextlib.suppress(TopologyInvalid):
                address = nic_address(nic)
                if first.setdefault(address, nic) != nic:
                    yield f"rank {rank} names one NIC twice: {first[address]} and {nic} are both {address}"


def port_interfaces(replica: Replica, host: str) -> tuple[tuple[str, ...], ...]:
    """For each rank the names of its NICs as `port_hosts` has their addresses: an address becomes the interface that
    has it, and stays itself where none has."""
    names = replica.nics_by_rank or ((host,),) * replica.parallel.num_ranks
    owner = {address: name for name, address in _interfaces()}
    return tuple(tuple(owner.get(nic, nic) for nic in nics) for nics in names)


def nic_address(nic: str) -> str:
    """The IPv4 address of a NIC of this machine: of a network interface, or the address itself. Raises TopologyInvalid,
    which names those that there are."""
    try:
        address = str(IPv4Address(nic))
    except AddressValueError:
        found = _interface_address(nic)
        if found is None:
            raise TopologyInvalid(
                f"{nic!r} is no network interface with an IPv4 address here: {_those_here()}"
            ) from None
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            raise TopologyInvalid(f"{address} is no address of this machine: {_those_here()}") from None
    return address


def _interface_address(name: str) -> str | None:
    """None: no such interface, or it has no IPv4 address."""
    if len(name.encode()) > _MAX_NAME_BYTES:
        return None  # else the system would look for its beginning
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            reply = fcntl.ioctl(control, _SIOCGIFADDR, struct.pack("256s", name.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def _those_here() -> str:
    return "there are " + ", ".join(f"{name} ({address})" for name, address in _interfaces())


def _interfaces() -> Iterator[tuple[str, str]]:
    """Names and addresses, of those that have one."""
    for _, name in socket.if_nameindex():
        if address := _interface_address(name):
            yield name, address
