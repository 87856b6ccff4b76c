"""A second process with a port of its own, seen from the test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Child:
    """fabric_child.py, and a call at a time to it. `hosts`: of its NICs, if not those that the kind has; `within`: a
    command that starts it, such as `ip netns exec NAME`."""

    def __init__(
        self, kind: str, arena_bytes: int, fill: int, hosts: Sequence[str] = (), within: Sequence[str] = ()
    ) -> None:
        program = Path(__file__).with_name("fabric_child.py")
        command = [*within, sys.executable, str(program), kind, str(arena_bytes), str(fill), *hosts]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self._answer()
        self.address = bytes.fromhex(self.hello["address"])

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def call(self, name: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        print(json.dumps({"call": name, **arguments}), file=self.process.stdin, flush=True)
        return self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
