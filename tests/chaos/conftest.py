"""Fixtures of the tests with faults; what they are made of is in tests/cluster.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster import MakeCluster, slow_toy
from cluster import make_cluster as make_plain_cluster
from namespaces import Namespaces, namespaces_or_skip

__all__ = ["make_cluster", "make_plain_cluster", "slow_toy"]


@pytest.fixture
def make_cluster(make_plain_cluster: MakeCluster) -> MakeCluster:
    """As everywhere, but handoffs are verified, and pages go as between machines, unless the test says otherwise."""

    def make(*args: Any, **sections: Any) -> Any:
        handoff = {"verify": "pages", **sections.get("handoff", {})}
        fabric = {"same_host": "fabric", **sections.get("fabric", {})}
        return make_plain_cluster(*args, **{**sections, "handoff": handoff, "fabric": fabric})

    return make


@pytest.fixture
def pair() -> Iterator[Namespaces]:
    with namespaces_or_skip() as found:
        yield found
