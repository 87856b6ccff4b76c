"""Fixtures of the tests with real daemons; what they are made of is in tests/cluster.py."""

from __future__ import annotations

from cluster import make_cluster, slow_toy

__all__ = ["make_cluster", "slow_toy"]
