"""Ratios and tables of `pdd bench fabric --vs`, and turns: all move one round before anyone moves the next."""

import pytest

from pdd.bench.compare import (
    Entrant,
    LeftOut,
    Plan,
    Race,
    Report,
    Series,
    best,
    measure,
    ratio,
    turns_of,
)
from pdd.bench.compare_text import alone, beside
from pdd.bench.contender import PEERS, Contender, ContenderFailed, Route, parse_peers, pdd_contender
from pdd.bench.machine import Machine
from pdd.bench.peers.pair import Took
from pdd.bench.percentile import percentile
from pdd.bench.posting import Posting

MACHINE = Machine(processor="a processor", num_cores=2, memory_bytes=2**34, kernel="6", python="3.11", load_average=0.5)
PLAN = Plan(arena_bytes=1 << 20, page_bytes=[4096], num_rounds=3, latency_page_bytes=[4096], num_writes=7)


def series(contender: str, *seconds: float, num_pages: int = 256) -> Series:
    return Series(contender=contender, page_bytes=4096, num_pages=num_pages, seconds=list(seconds))


class FakeRunning:
    """A contender that needs no process: it is as fast as it is told, and writes down its turns."""

    def __init__(self, contender: Contender, turns: list[tuple[str, int]], seconds: float, fails_at: int = 99) -> None:
        self.contender, self.version = contender, "fake 1"
        self._turns, self._seconds, self._fails_at = turns, seconds, fails_at

    def turn(self, page_bytes: int, num_pages: int, count: int) -> list[Took]:
        name = self.contender.name
        if sum(each == name for each, _ in self._turns) == self._fails_at:
            raise ContenderFailed("it broke")
        self._turns.append((name, count))
        return [Took(self._seconds * num_pages, None)] * count

    def close(self) -> None:
        self._turns.append((self.contender.name, -1))


def run(*runners: FakeRunning) -> Report:
    left_out = [LeftOut("mooncake", "not installed")]
    return measure(runners, left_out, MACHINE, PLAN, lambda _: None)  # type: ignore[arg-type]


def test_a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians() -> None:
    found = ratio(series("pdd net", 1.0, 2.0, 4.0), series("nixl-tcp", 3.0, 2.0, 4.0))
    assert (found.median, found.low, found.high, found.num_rounds) == (1.0, 1.0, 3.0, 3)


def test_different_pages_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different pages"):
        ratio(series("pdd net", 1.0), series("nixl-tcp", 1.0, num_pages=255))


def test_the_best_is_the_one_with_the_best_median() -> None:
    lucky, steady = series("nixl-tuned", 0.1, 5.0, 5.0), series("nixl-default", 1.0, 1.0, 1.0)
    assert best([lucky, steady]) is steady


def test_percentiles_are_the_same_everywhere() -> None:
    seconds = [i / 1e6 for i in range(1, 101)]
    assert percentile(seconds, 99) == series("pdd net", *seconds).percentile_s(99) == 100e-6
    assert "50/100;" in Posting(write=seconds, write_waking=seconds, announce_waking=seconds).text()


def test_percentiles_of_few_samples_exist() -> None:
    assert series("pdd net", 3.0, 1.0, 2.0).percentile_s(99) == 3.0
    assert series("pdd net", 3.0, 1.0, 2.0).percentile_s(0) == 1.0


@pytest.mark.parametrize(("num_writes", "num_turns"), [(500, 5), (7, 3), (2, 5), (1, 1)])
def test_all_writes_are_dealt_out(num_writes: int, num_turns: int) -> None:
    turns = turns_of(num_writes, num_turns)
    assert sum(turns) == num_writes
    assert min(turns) > 0
    assert max(turns) - min(turns) <= 1


def test_contenders_take_turns_and_the_first_turn_is_not_counted() -> None:
    turns: list[tuple[str, int]] = []
    race = Race([FakeRunning(pdd_contender("net"), turns, 1.0), FakeRunning(PEERS["memcpy"][0], turns, 2.0)])  # type: ignore[list-item]
    ours, peer = race.series(4096, 256, [1, 1])
    assert [name for name, _ in turns] == ["pdd net", "memcpy"] * 3
    assert (ours.seconds, peer.seconds) == ([256.0, 256.0], [512.0, 512.0])


def test_one_that_breaks_drops_out_and_the_rest_go_on() -> None:
    turns: list[tuple[str, int]] = []
    report = run(
        FakeRunning(pdd_contender("net,tcp"), turns, 1e-6), FakeRunning(PEERS["mooncake"][0], turns, 1.0, fails_at=2)
    )
    assert [each.contender for each in report.throughput] == ["pdd net"]
    assert [each.failure for each in report.entrants] == ["", "it broke (256 pages of 4096 bytes)"]
    assert [name for name, count in turns if count < 0] == ["mooncake"], "it must not go on beside the others"
    text = "\n".join(beside(report))
    assert "failed: mooncake: it broke" in text
    assert "left out: mooncake: not installed" in text


def test_the_table_sets_each_beside_pdd_on_its_own_route_only() -> None:
    turns: list[tuple[str, int]] = []
    nixl = {each.name: each for each in PEERS["nixl"]}
    report = run(
        FakeRunning(pdd_contender("net,tcp"), turns, 1e-6),
        FakeRunning(pdd_contender("shm"), turns, 1e-6),
        FakeRunning(nixl["nixl-tcp"], turns, 2e-6),
        FakeRunning(nixl["nixl-default"], turns, 4e-6),
        FakeRunning(nixl["nixl-tuned"], turns, 3e-6),
    )
    lines = list(beside(report))
    network = lines[lines.index("pdd net / peer, median of the rounds' ratios (min-max), n 3:") + 1 :][:2]
    host = lines[lines.index("pdd shm / peer, median of the rounds' ratios (min-max), n 3:") + 1 :][:2]
    assert network[0].split() == ["page", "nixl-tcp", "best", "NIXL"]
    assert network[1].split() == ["4", "KiB", "2.00", "(2.00-2.00)", "2.00", "tcp"]
    assert host[0].split() == ["page", "nixl-default", "nixl-tuned", "best", "NIXL"]
    assert host[1].split()[2:] == ["4.00", "(4.00-4.00)", "3.00", "(3.00-3.00)", "3.00", "tuned"]
    assert lines.count("  " + PEERS["nixl"][0].note) == 1


def test_the_table_of_pdd_alone_has_pages_and_latency() -> None:
    report = run(FakeRunning(pdd_contender("shm"), [], 1e-6))
    lines = list(alone(report))
    assert lines[0].startswith("fake 1; 1 MiB a round")
    assert lines[2].split() == ["4", "KiB", "4.10", "4.10", "-", "4.10", "1000000", "3"]
    assert lines[4].split() == ["4", "KiB", "1/1", "-", "n", "7"]


def test_every_peer_has_a_name_of_its_own() -> None:
    names = [each.name for group in PEERS.values() for each in group]
    assert len(set(names)) == len(names)
    assert [each.name for each in parse_peers("all")] == names


def test_peers_come_by_group_or_by_name_once() -> None:
    assert [each.name for each in parse_peers("tcp-paged,memcpy,tcp")] == ["tcp-paged", "memcpy", "tcp-vectored"]


@pytest.mark.parametrize("text", ["", ",", "nixl,rdma", "NIXL"])
def test_an_unknown_peer_is_named_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ValueError, match=r"is none of .*mooncake.*all"):
        parse_peers(text)


def test_a_provider_s_route_follows_from_its_name() -> None:
    assert pdd_contender("net,tcp").route is Route.NETWORK
    assert pdd_contender("shm").route is Route.SAME_HOST


def test_an_entrant_s_failure_is_part_of_the_report() -> None:
    assert Entrant(contender=pdd_contender("shm"), version="1").failure == ""
