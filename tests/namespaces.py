"""Two hosts on one machine: network namespaces with cables between them that can be pulled.

here (10.213.n.1) ---- decode namespace (10.213.n.2 | 10.213.n.6) ---- prefill namespace (10.213.n.5)
              clients                  (             | 10.213.n.10) ---                  (10.213.n.9)
                                                             the cables, one or more
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from cluster import prefill_and_decode


class NoNamespaces(Exception):
    """Why they cannot be had here."""


class Namespaces:
    def __init__(self, num_cables: int = 1) -> None:
        self._tag = secrets.token_hex(3)
        self._net = f"10.213.{secrets.randbelow(256)}"
        self.prefill, self.decode = f"pdd-p-{self._tag}", f"pdd-d-{self._tag}"
        self.prefill_hosts = [f"{self._net}.{4 * cable + 5}" for cable in range(num_cables)]
        self.decode_hosts = [f"{self._net}.{4 * cable + 6}" for cable in range(num_cables)]
        self.prefill_host, self.decode_host, self.http_host = *self._ends(0), f"{self._net}.2"

    def _ends(self, cable: int) -> tuple[str, str]:
        return self.prefill_hosts[cable], self.decode_hosts[cable]

    def _device(self, cable: int, side: str) -> str:
        return f"c{self._tag}{cable}{side}"

    def make(self) -> None:
        near = f"h{self._tag}"
        for name in (self.prefill, self.decode):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", f"{near}h", "type", "veth", "peer", "name", f"{near}d", "netns", self.decode)
        _up((), f"{near}h", f"{self._net}.1")
        _up(("-n", self.decode), f"{near}d", self.http_host)
        for cable, (prefill_host, decode_host) in enumerate(zip(self.prefill_hosts, self.decode_hosts, strict=True)):
            prefill_end, decode_end = self._device(cable, "p"), self._device(cable, "d")
            ip("link", "add", prefill_end, "netns", self.prefill, "type", "veth",
               "peer", "name", decode_end, "netns", self.decode)  # fmt: skip
            _up(("-n", self.prefill), prefill_end, prefill_host)
            _up(("-n", self.decode), decode_end, decode_host)

    def cut(self, cable: int = 0) -> None:
        """The prefiller's kernel sees that it is gone."""
        ip("-n", self.prefill, "link", "set", self._device(cable, "p"), "down")

    def swallow(self, cable: int = 0) -> None:
        """Nobody sees anything: packets leave the prefiller for a station that there is not."""
        self._neighbour("replace", cable, "lladdr", "02:00:00:00:00:01", "nud", "permanent")

    def mend(self, cable: int = 0) -> None:
        """After either."""
        with suppress(NoNamespaces):  # it was cut, and its neighbours are forgotten
            self._neighbour("del", cable)
        ip("-n", self.prefill, "link", "set", self._device(cable, "p"), "up")

    def _neighbour(self, do: str, cable: int, *what: str) -> None:
        ip("-n", self.prefill, "neighbour", do, self.decode_hosts[cable], *what, "dev", self._device(cable, "p"))

    def slow(self, cable: int, rate: str) -> None:
        """What the prefiller sends there, for example at `50mbit`. Raises NoNamespaces where there is no tc."""
        bucket = ("tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
        _run("tc", "-n", self.prefill, "qdisc", "replace", "dev", self._device(cable, "p"), "root", *bucket)

    def remove(self) -> None:
        """Devices go with their namespaces."""
        for name in (self.prefill, self.decode):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _up(where: Sequence[str], device: str, address: str) -> None:
    ip(*where, "address", "add", f"{address}/30", "dev", device)
    ip(*where, "link", "set", device, "up")


def ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NoNamespaces(f"there is no {command[0]} command") from error
    if done.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def namespaces(num_cables: int = 1) -> Iterator[Namespaces]:
    """Raises NoNamespaces where they cannot be made."""
    if os.geteuid() or not shutil.which("ip"):
        raise NoNamespaces("network namespaces need root and the ip command")
    pair = Namespaces(num_cables)
    try:
        pair.make()
        yield pair
    finally:
        pair.remove()


@contextmanager
def namespaces_or_skip(num_cables: int = 1) -> Iterator[Namespaces]:
    """For fixtures: the test is skipped where they cannot be made."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(namespaces(num_cables))
        except NoNamespaces as reason:
            pytest.skip(str(reason))
        yield found


def nodes_in(pair: Namespaces, **replica: Any) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """A prefiller and a decoder with the cables between them, and the commands that start them there. Both listen on
    the first cable; where there are more, each rank has a NIC on each."""
    nodes = prefill_and_decode(**replica)
    if len(pair.prefill_hosts) > 1:
        nodes["prefill0"]["replicas"][0]["nics"] = [pair.prefill_hosts]
        nodes["decode0"]["replicas"][0]["nics"] = [pair.decode_hosts]
    nodes["prefill0"]["host"], nodes["decode0"]["host"] = pair.prefill_host, pair.decode_host
    nodes["decode0"]["http"]["host"] = pair.http_host
    return nodes, {
        "prefill0": ["ip", "netns", "exec", pair.prefill],
        "decode0": ["ip", "netns", "exec", pair.decode],
    }
