"""A fabric that is not there is told of before executors load a model."""

from __future__ import annotations

from typing import Any

import pytest

from pdd.base.errors import FabricUnavailable
from pdd.daemon.replica import try_fabric
from pdd.topology.model import Fabric, Provider, Replica, Role

HOSTS = (("127.0.0.1",),)


def replica(role: Role) -> Any:
    return Replica(role=role, kv_bytes=1 << 20)


def test_a_provider_that_is_not_there_is_told_of_before_anything_starts() -> None:
    with pytest.raises(FabricUnavailable, match="has none of the providers"):
        try_fabric(replica(Role.PREFILL), Fabric(provider=Provider.VERBS), HOSTS)


def test_one_that_is_there_and_one_that_nobody_needs_are_fine() -> None:
    try_fabric(replica(Role.DECODE), Fabric(provider=Provider.TCP), HOSTS)
    try_fabric(replica(Role.COLOCATED), Fabric(provider=Provider.VERBS), HOSTS)
