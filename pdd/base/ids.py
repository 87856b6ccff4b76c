"""Names and numbers that travel between processes, each with a type of its own so that mypy keeps them apart."""

from __future__ import annotations

import secrets
from typing import NewType

NodeName = NewType("NodeName", str)
"""A machine of the topology; one daemon each."""
ReplicaName = NewType("ReplicaName", str)
"""One running copy of the model: `<node>/<index>`, for example `decode0/0`."""
RequestId = NewType("RequestId", str)
"""One sequence from submission to its last token; unique in the cluster."""
Incarnation = NewType("Incarnation", str)
"""Random id of one daemon's life (16 hex digits): a restarted daemon is another peer."""
PageId = NewType("PageId", int)
"""Index of a page in an arena; the same index in every layer."""
SequenceId = NewType("SequenceId", int)
"""Number of a sequence inside one replica's executors; never reused in one life of the replica."""
Immediate = NewType("Immediate", int)
"""The 32-bit number that rides with a one-sided write (see fabric/immediate.py)."""


def new_request_id(prefix: str) -> RequestId:
    """A fresh id such as `cmpl-5f0c...`: 96 random bits, so that ids of several frontends never meet."""
    return RequestId(f"{prefix}-{secrets.token_hex(12)}")


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(8))


def replica_name(node: NodeName, index: int) -> ReplicaName:
    return ReplicaName(f"{node}/{index}")


def is_of(replica: ReplicaName, node: NodeName) -> bool:
    """By its name, a replica or a replica set of that node."""
    return replica.startswith(f"{node}/")


def set_name(replica: ReplicaName, dp_rank: int, dp: int) -> ReplicaName:
    """Of a replica set, which is a replica to its peers: `decode0/0`, or `decode0/0.1` for the second of several."""
    return replica if dp == 1 else ReplicaName(f"{replica}.{dp_rank}")
