"""`pdd bench watch`: what is subtracted from what, with fakes; and a few real samples, of which no time is asserted."""

import argparse

import msgspec
import pytest

from pdd.bench import watch
from pdd.bench.machine import Machine
from pdd.bench.watch import Counter, PortSender, Report, Sample, take, timing
from pdd.fabric.port import Token, WriteDone

MACHINE = Machine(processor="a processor", num_cores=2, memory_bytes=2**34, kernel="6", python="3.11", load_average=0.5)


class FakeSender:
    def __init__(self, log: list[object], posted_s: float | None) -> None:
        self._log, self._posted_s = log, posted_s

    def arm(self, number: int) -> None:
        self._log.append(f"armed {number}")

    def wait(self) -> float | None:
        self._log.append("done")
        return self._posted_s


class FakeLine:
    def __init__(self, log: list[object], name: str, *answers: object) -> None:
        self._log, self._name, self._answers = log, name, list(answers)

    def say(self, message: object) -> None:
        self._log.append(f"{self._name} {message}")

    def hear(self) -> object:
        return self._answers.pop(0)


def test_both_sides_are_armed_before_the_counter_rises() -> None:
    log: list[object] = []
    sample = take(
        FakeSender(log, 1.5), FakeLine(log, "raiser", 1.0), FakeLine(log, "target", "armed", 2.0), 7, rest_s=0.25
    )
    assert sample == Sample(1.0, 1.5, 2.0)
    assert log == ["target 7", "armed 7", "raiser 0.25", "done"]


def test_times_are_counted_from_the_counter_s_change() -> None:
    found = timing("spinning", [Sample(1.0, 1.000005, 1.00002), Sample(2.0, 2.000007, 2.00003)])
    assert found.posted_us == pytest.approx([5, 7], abs=0.01)
    assert found.arrived_us == pytest.approx([20, 30], abs=0.01)


def test_a_port_that_does_not_say_when_it_posted_gets_no_row_for_it() -> None:
    found = timing("spinning", [Sample(1.0, None, 1.00002)])
    assert found.posted_us == []
    lines = list(watch.table(Report(machine=MACHINE, provider="net", page_bytes=32768, num_pages=16, timings=[found])))
    assert "spinning: first page arrived" in lines[2]
    assert lines[3] == "  spinning: this port does not say when it posted"


@pytest.mark.parametrize(("slow_us", "answer"), [(50.0, "yes"), (150.0, "no")])
def test_the_goal_is_judged_by_both_percentiles(slow_us: float, answer: str) -> None:
    samples = [Sample(0.0, 5e-6, 1e-5)] * 97 + [Sample(0.0, slow_us / 1e6, 2e-4)] * 3
    timings = [timing("spinning", samples)]
    lines = list(watch.table(Report(machine=MACHINE, provider="net", page_bytes=4096, num_pages=1, timings=timings)))
    assert lines[2].split()[-4:] == ["5.0", f"{slow_us:.1f}", f"{slow_us:.1f}", "100"]
    assert lines[-1].endswith(answer)


class DoneAt(WriteDone, frozen=True):
    first_s: float


class FakeEnd:
    """As much of an End as a PortSender uses; its port says when it posted, or does not."""

    def __init__(self, done: WriteDone) -> None:
        self.port, self._done = self, done

    def watch(self, counter_address: int, wake_fd: int) -> int:
        return 1

    def wait(self, kind: type[WriteDone]) -> WriteDone:
        assert isinstance(self._done, kind)
        return self._done


@pytest.mark.parametrize(
    ("done", "posted_s"), [(WriteDone(Token(1), 0, 1, 1), None), (DoneAt(Token(1), 0, 1, 1, first_s=2.5), 2.5)]
)
def test_the_time_of_posting_is_used_where_the_port_offers_it(done: WriteDone, posted_s: float | None) -> None:
    end = FakeEnd(done)
    end.spec = lambda **_: None  # type: ignore[attr-defined]
    sender = PortSender(end, Counter(), 4096, 1)  # type: ignore[arg-type]
    assert sender.wait() == posted_s


def test_a_counter_rises_by_one_and_wakes() -> None:
    counter = Counter()
    counter.raise_one()
    counter.raise_one()
    assert counter.value == 2


def test_copies_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    watch.add_arguments(parser)
    assert watch.run(parser.parse_args(["--provider", "copy", "--samples", "2", "--rest-ms", "1", "--pages", "2"])) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("copy, 2 pages of 32 KiB")


def test_real_processes_take_real_samples(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    watch.add_arguments(parser)
    assert watch.run(parser.parse_args(["--samples", "5", "--rest-ms", "1", "--pages", "2", "--json"])) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=Report)
    assert [each.way for each in report.timings] == ["sleeping in poll", "spinning"]
    assert all(len(each.arrived_us) == 5 and min(each.arrived_us) > 0 for each in report.timings)
