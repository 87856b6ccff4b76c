"""When a prefiller whose pages do not arrive is left out, and when it is asked again."""

from __future__ import annotations

from pdd.base.ids import Incarnation, NodeName, ReplicaName
from pdd.daemon.paths import Paths

OURS, OTHER, THEIRS = ReplicaName("d/0"), ReplicaName("d/1"), ReplicaName("p/0")
LIFE = Incarnation("1")


def broken(num_failures: int, at_s: float = 0.0) -> Paths:
    paths = Paths()
    for _ in range(num_failures):
        paths.failed(OURS, THEIRS, LIFE, "no route", at_s)
    return paths


def pause_s(paths: Paths) -> float:
    return next(at_s for at_s in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0) if not paths.rests(OURS, THEIRS, at_s))


def test_one_failure_is_no_rule_and_pauses_grow() -> None:
    assert [pause_s(broken(num)) for num in (0, 1, 2, 3, 4, 5, 6, 7, 2000)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    assert not list(broken(1).broken())
    assert list(broken(2).broken()) == [(THEIRS, "pages do not arrive from p/0 in d/0: no route")]


def test_after_the_pause_one_handoff_finds_out() -> None:
    paths = broken(3)
    paths.tried(OURS, THEIRS, 2.0)
    assert paths.rests(OURS, THEIRS, 3.9)
    assert not paths.rests(OURS, THEIRS, 4.0), "it may be that nothing is ever heard of it"
    paths.worked(OURS, THEIRS)
    assert not paths.rests(OURS, THEIRS, 2.0)
    assert not list(paths.broken())


def test_each_of_our_replicas_has_a_path_of_its_own() -> None:
    paths = broken(2)
    assert not paths.rests(OTHER, THEIRS, 0.5)
    paths.worked(OTHER, THEIRS)
    assert paths.rests(OURS, THEIRS, 0.5)


def test_a_new_life_of_the_node_begins_without_faults() -> None:
    paths = broken(2)
    paths.forget(NodeName("p"), LIFE)
    paths.forget(NodeName("p1"), Incarnation("2"))
    assert paths.rests(OURS, THEIRS, 0.5), "a link that was cut and restored mends no fabric"
    paths.forget(NodeName("p"), Incarnation("2"))
    assert not paths.rests(OURS, THEIRS, 0.5)
