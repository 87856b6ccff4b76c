"""A replica that cannot have its fabric says so before anything is started for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pdd.base.clock import MonotonicClock
from pdd.base.errors import FabricUnavailable
from pdd.base.ids import ReplicaName
from pdd.daemon import replica
from pdd.daemon.metrics import Metrics
from pdd.topology.model import Fabric, Limits, Provider, Replica, Role


async def test_a_provider_that_is_not_there_costs_no_start_of_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_ranks(*_: Any) -> Any:
        raise AssertionError("executors are started, and load a model for nothing")

    monkeypatch.setattr(replica, "_start_ranks", start_ranks)
    config: Any = Replica(role=Role.PREFILL, kv_bytes=1 << 20)
    model: Any = None
    with pytest.raises(FabricUnavailable, match="has none of the providers"):
        await asyncio.wait_for(
            replica.Replica.start(
                ReplicaName("prefill0/0"), config, model,
                hosts=(("127.0.0.1",),), progress_cores=((),), run_dir=Path(), fabric=Fabric(provider=Provider.VERBS),
                limits=Limits(), max_sequence_tokens=16, clock=MonotonicClock(), metrics=Metrics(),
            ),
            10.0,
        )  # fmt: skip
