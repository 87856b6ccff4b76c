"""How the ranks of a set report to their lead without torch: the toy's only collective, over a Unix socket.

Bytes go one way. The lead goes on when every rank has reported; a rank that reports need not wait for anybody.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from pdd.base.errors import OperatorError, ReplicaFailed
from pdd.engine.protocol import ExecutorConfig

JOIN_S = 60.0
"""For all ranks of a set to appear."""
GATHER_S = 60.0
"""For all ranks to report."""
_RETRY_S = 0.02
_RANK_BYTES = 4


class Gathering:
    """One rank's end: towards the lead, or the lead's towards each other rank in order."""

    def __init__(self, name: str, tp_rank: int, tp: int, others: list[socket.socket]) -> None:
        self.tp_rank = tp_rank
        self.tp = tp
        self._name = name
        self._others = others
        for one in others:
            one.settimeout(GATHER_S)

    @classmethod
    def solo(cls) -> Gathering:
        """Of a rank that has no others."""
        return cls("the only rank", 0, 1, [])

    @classmethod
    def join(cls, config: ExecutorConfig) -> Gathering:
        """Meets the other ranks of the set at `config.rendezvous`, to which the set's number is added.

        Raises OperatorError where they stay away.
        """
        dp_rank, tp_rank = divmod(config.rank, config.tp)
        name, path = f"{config.replica} rank {config.rank}", Path(f"{config.rendezvous}.{dp_rank}")
        if config.tp == 1:
            return cls.solo()
        # Paths of sockets have at most 107 bytes; by way of a descriptor of its directory any path will do.
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            address = f"/proc/self/fd/{directory}/{path.name}"
            others = _accept(address, config.tp - 1) if tp_rank == 0 else [_connect(address, tp_rank)]
        except OSError as error:
            raise OperatorError(
                f"{name}: the {config.tp} ranks of the set did not meet at {path} within {JOIN_S:g} s ({error}); "
                "see why the others did not start"
            ) from error
        finally:
            os.close(directory)
        return cls(name, tp_rank, config.tp, others)

    def gather(self, report: bytes) -> list[bytes]:
        """On the lead, each rank's report in order of rank, when all are there; elsewhere nothing. All reports of one
        round have the same length. Raises ReplicaFailed where a rank is gone."""
        try:
            if self.tp_rank == 0:
                return [report, *(_exactly(one, len(report)) for one in self._others)]
            for one in self._others:
                one.sendall(report)
        except OSError as error:
            raise ReplicaFailed(f"{self._name}: another rank of the replica died or stopped: {error}") from error
        return []


def _accept(address: str, num_others: int) -> list[socket.socket]:
    """The other ranks' connections, by rank."""
    others: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(JOIN_S)
        listener.bind(address)
        try:
            listener.listen(num_others)
            while len(others) < num_others:
                one, _ = listener.accept()
                one.settimeout(JOIN_S)
                others[int.from_bytes(_exactly(one, _RANK_BYTES), "little")] = one
        finally:
            os.unlink(address)
    return [others[rank] for rank in sorted(others)]


def _connect(address: str, tp_rank: int) -> socket.socket:
    """To the lead, which may start later than we do."""
    deadline_s = time.monotonic() + JOIN_S
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address)
            sock.sendall(tp_rank.to_bytes(_RANK_BYTES, "little"))
            return sock
        except (FileNotFoundError, ConnectionRefusedError):  # not bound, or not yet listening
            sock.close()
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_RETRY_S)


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("its socket closed")
        data += part
    return bytes(data)
