"""Two hosts on one machine: network namespaces with a cable between them that can be pulled.

here (10.213.n.1) ---- decode namespace (10.213.n.2 | 10.213.n.6) ---- prefill namespace (10.213.n.5)
              clients                                          the cable
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster import prefill_and_decode


class NoNamespaces(Exception):
    """Why they cannot be had here."""


class Namespaces:
    def __init__(self) -> None:
        self._tag = secrets.token_hex(3)
        self._net = f"10.213.{secrets.randbelow(256)}"
        self.prefill, self.decode = f"pdd-p-{self._tag}", f"pdd-d-{self._tag}"
        self.prefill_host, self.decode_host, self.http_host = f"{self._net}.5", f"{self._net}.6", f"{self._net}.2"

    def make(self) -> None:
        cable, near = f"c{self._tag}", f"h{self._tag}"
        for name in (self.prefill, self.decode):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", f"{cable}p", "netns", self.prefill, "type", "veth",
           "peer", "name", f"{cable}d", "netns", self.decode)  # fmt: skip
        ip("link", "add", f"{near}h", "type", "veth", "peer", "name", f"{near}d", "netns", self.decode)
        for where, device, address in (
            (("-n", self.prefill), f"{cable}p", f"{self.prefill_host}/30"),
            (("-n", self.decode), f"{cable}d", f"{self.decode_host}/30"),
            (("-n", self.decode), f"{near}d", f"{self.http_host}/30"),
            ((), f"{near}h", f"{self._net}.1/30"),
        ):
            ip(*where, "address", "add", address, "dev", device)
            ip(*where, "link", "set", device, "up")

    def cut(self) -> None:
        ip("-n", self.prefill, "link", "set", f"c{self._tag}p", "down")

    def mend(self) -> None:
        ip("-n", self.prefill, "link", "set", f"c{self._tag}p", "up")

    def remove(self) -> None:
        """Devices go with their namespaces."""
        for name in (self.prefill, self.decode):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise NoNamespaces(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def namespaces() -> Iterator[Namespaces]:
    """Raises NoNamespaces where they cannot be made."""
    if os.geteuid() or not shutil.which("ip"):
        raise NoNamespaces("network namespaces need root and the ip command")
    pair = Namespaces()
    try:
        pair.make()
        yield pair
    finally:
        pair.remove()


def nodes_in(pair: Namespaces, **replica: Any) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """A prefiller and a decoder with the cable between them, and the commands that start them there."""
    nodes = prefill_and_decode(**replica)
    nodes["prefill0"]["host"], nodes["decode0"]["host"] = pair.prefill_host, pair.decode_host
    nodes["decode0"]["http"]["host"] = pair.http_host
    return nodes, {
        "prefill0": ["ip", "netns", "exec", pair.prefill],
        "decode0": ["ip", "netns", "exec", pair.decode],
    }
