"""What only the libfabric port does: its choice of a provider, the process around it, and its numbers."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fabric_bench import ARENA_BYTES, NUM_LAYERS, NUM_PAGES, Bench, make_bench

from pdd._fabric import ffi
from pdd.base.errors import FabricError, FabricUnavailable
from pdd.fabric.immediate import pack
from pdd.fabric.libfabric import EVENT, PROVIDERS, WRITE, LibfabricPort, measure, sweep_dead_endpoints
from pdd.topology.model import Provider


@pytest.mark.parametrize("provider", [Provider.TCP, Provider.SHM])
def test_signal_handlers_stay_the_processes_own(provider: Provider) -> None:
    """libfabric installs its own at the first opening in a process: hence a process of its own."""
    program = """
import ctypes, signal, sys
from pdd.fabric.libfabric import LibfabricPort
from pdd.topology.model import Provider
def disposition(number):
    action = (ctypes.c_ubyte * 256)()
    ctypes.CDLL(None).sigaction(number, None, action)
    return bytes(action)[:8]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGBUS, signal.SIGSEGV]
before = [disposition(number) for number in numbers]
port = LibfabricPort.open(Provider(sys.argv[1]), ["127.0.0.1"], spin_us=0, copies=True)
assert [disposition(number) for number in numbers] == before
signal.raise_signal(signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", program, provider], check=False).returncode == 42


def test_the_progress_thread_takes_no_signals() -> None:
    main_thread = threading.get_native_id()
    before = set(os.listdir("/proc/self/task"))
    port = LibfabricPort.open(Provider.TCP, ["127.0.0.1"], spin_us=0, copies=True)
    new = set(os.listdir("/proc/self/task")) - before - {str(main_thread)}
    assert new
    for thread in new:
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
        assert blocked & 1 << (signal.SIGTERM - 1)
    port.close()


def test_an_unknown_provider_is_refused_with_what_there_is() -> None:
    with pytest.raises(FabricUnavailable, match=r"none of the providers \[efa9\].*it offers: .*(net|tcp)"):
        LibfabricPort("efa9")


@pytest.mark.parametrize("provider", [Provider.EFA, Provider.VERBS])
def test_an_rdma_provider_without_a_nic_is_refused_with_what_there_is(provider: Provider) -> None:
    name = re.escape(PROVIDERS[provider])
    with pytest.raises(
        FabricUnavailable, match=rf"none of the providers \[{name}\].*it offers: .*Check `fabric.provider`"
    ):
        LibfabricPort.open(provider, ["127.0.0.1"], spin_us=0, copies=False)


def test_a_provider_is_never_replaced_by_a_similar_one() -> None:
    """1.17 answers "tcp" with "tcp;ofi_rxm"; newer libraries have a tcp of their own."""
    with contextlib.suppress(FabricUnavailable):
        port = LibfabricPort("tcp")
        assert port.info.provider == "tcp"
        port.close()


@pytest.mark.parametrize("provider", list(Provider))
def test_a_port_for_a_gpu_s_memory_wants_a_nic_that_reaches_it(provider: Provider) -> None:
    with pytest.raises(FabricUnavailable, match="one-sided writes of CUDA memory on host"):
        LibfabricPort.open(provider, ["127.0.0.1"], spin_us=0, copies=False, cuda=True)


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(FabricUnavailable, match=r"203\.0\.113\.9"):
        LibfabricPort.open(Provider.TCP, ["127.0.0.1", "203.0.113.9"], spin_us=0, copies=False)


@pytest.mark.parametrize("providers", ["net,tcp", "shm"])
def test_measure_gives_a_rate_and_leaves_no_trace(providers: str) -> None:
    port = LibfabricPort(providers)
    rate = measure(port)
    assert rate is None or rate > 0.001
    assert port.events() == []
    port.close()


def test_measure_works_beyond_the_descriptors_that_select_takes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("the system lets nobody have so many descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (fd := os.open(os.devnull, os.O_RDONLY)) < 1024:
            stack.callback(os.close, fd)
        stack.callback(os.close, fd)
        port = LibfabricPort("net,tcp")
        stack.callback(port.close)
        assert port.fileno() > 1024
        measure(port)


def test_endpoints_of_the_dead_are_swept_and_of_the_living_are_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f"pdd-{dead.pid}:0:0"
    kept = [tmp_path / f"pdd-{os.getpid()}:0:0", tmp_path / "pdd-x:0", tmp_path / f"other-{dead.pid}:0:0"]
    for path in [left, *kept]:
        path.touch()
    assert sweep_dead_endpoints(tmp_path) == [left]
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_killed_process_leaves_endpoints_and_the_next_start_sweeps_them() -> None:
    program = """
import ctypes, os, signal
from pdd.fabric.libfabric import LibfabricPort
from pdd.topology.model import Provider
port = LibfabricPort.open(Provider.SHM, ["127.0.0.1"], spin_us=0, copies=False)
memory = ctypes.create_string_buffer(4096)
port.register(ctypes.addressof(memory), 4096)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.Popen([sys.executable, "-c", program])
    killed.wait()
    left = list(Path("/dev/shm").glob(f"pdd-{killed.pid}:*"))
    assert left
    LibfabricPort.open(Provider.SHM, ["127.0.0.1"], spin_us=0, copies=False).close()
    assert not any(path.exists() for path in left)


def test_pages_are_joined_and_carried_four_at_a_time() -> None:
    bench = make_bench("tcp")
    scattered = [(2 * i, 63 - 2 * i) for i in range(NUM_PAGES // 2)]
    assert count_messages(bench, scattered) == NUM_LAYERS * len(scattered) // bench.source_port.info.pages_per_write
    joined = [(i, i) for i in range(NUM_PAGES)]
    assert count_messages(bench, joined) == NUM_LAYERS
    bench.close()


def count_messages(bench: Bench, pages: list[tuple[int, int]]) -> int:
    port, immediate = bench.source_port, pack(1, 1)
    assert isinstance(port, LibfabricPort)
    before = port.statistics()["num_messages"]
    bench.target_port.expect(immediate, NUM_LAYERS * len(pages))
    port.write(bench.spec(1, immediate, pages))
    bench.wait(bench.target_port)
    bench.wait(port)
    return port.statistics()["num_messages"] - before


def test_what_is_packed_is_laid_out_as_in_c() -> None:
    for packed, name in ((WRITE, "struct pdd_write"), (EVENT, "struct pdd_event")):
        assert packed.size == ffi.sizeof(name)
    fields = [name for name, _ in ffi.typeof("struct pdd_write").fields if name != "reserved"]
    spec = ffi.new("struct pdd_write *")
    WRITE.pack_into(ffi.buffer(spec), 0, *range(1, len(fields) + 1))
    assert [int(ffi.cast("uintptr_t", getattr(spec, name))) for name in fields] == list(range(1, len(fields) + 1))
    fields = [name for name, _ in ffi.typeof("struct pdd_event").fields if name != "slot"]
    event = ffi.new("struct pdd_event *", {name: number for number, name in enumerate(fields)})
    assert EVENT.unpack(ffi.buffer(event)) == tuple(range(len(fields)))


def test_numbers_that_do_not_fit_are_refused() -> None:
    bench = make_bench("tcp")
    for changes in ({"source_pages": (-1,)}, {"source_pages": (1 << 32,)}, {"counter_base": -1}):
        with pytest.raises(FabricError):
            bench.source_port.write(bench.spec(1, pack(1, 1), [(0, 0)], **changes))
    with pytest.raises(FabricError):
        bench.source_port.register(bench.source.address, 0)
    bench.probe()
    bench.close()


def test_a_storm_of_strays_is_counted_but_not_told_one_by_one() -> None:
    bench = make_bench("tcp")
    num_writes = 1000
    for token in range(num_writes):
        bench.source_port.write(bench.spec(token, pack(token, 3), [(0, 0)]))
    bench.wait(bench.source_port, num_writes)
    bench.probe(pack(4001, 1))
    assert isinstance(bench.target_port, LibfabricPort)
    assert bench.target_port.statistics()["num_strays"] == num_writes * NUM_LAYERS
    assert len(bench.left(bench.target_port)) <= 2 * 64
    bench.close()


@pytest.mark.parametrize("kind", ["tcp", "two-nics", "copy"])
def test_idle_ports_cost_next_to_nothing(kind: str) -> None:
    """No time is asserted: the number of wake-ups is what must not grow with it."""
    bench = make_bench(kind, spin_us=200)
    bench.probe()
    ports = [bench.source_port, bench.target_port]
    assert all(isinstance(port, LibfabricPort) for port in ports)
    threading.Event().wait(0.1)
    before = [port.statistics()["num_wakeups"] for port in ports]  # type: ignore[attr-defined]
    threading.Event().wait(0.5)
    after = [port.statistics()["num_wakeups"] for port in ports]  # type: ignore[attr-defined]
    assert sum(after) - sum(before) < 20
    bench.close()


def wakeups_of_layers(spin_us: int, num_layers: int) -> tuple[int, int]:
    """How often a progress thread wakes up while layers come every 2 ms, and while it is asked for something when all
    has been told."""
    bench = make_bench("tcp")
    port = LibfabricPort("net,tcp", spin_us=spin_us)
    memory = port.register(bench.source.address, ARENA_BYTES)
    spec = bench.spec(
        1, pack(1, 1), [(0, 0)], peer=port.add_peer(bench.target_memory.address), memory=memory.memory,
        watch=port.watch(bench.source.counter_address, wake_fd := os.eventfd(0, os.EFD_NONBLOCK)),
        num_layers=num_layers, source_layer_bytes=0, target_layer_bytes=0,
    )  # fmt: skip
    port.write(spec)
    before = port.statistics()["num_wakeups"]
    for layer in range(num_layers):
        threading.Event().wait(0.002)
        bench.source.raise_counter(layer + 1)
        os.eventfd_write(wake_fd, 1)
    bench.wait(port)
    ended = port.statistics()["num_wakeups"]
    threading.Event().wait(0.5)
    port.release(memory.memory)
    after = port.statistics()["num_wakeups"]
    port.close()
    bench.close()
    os.close(wake_fd)
    return ended - before, after - ended


def test_a_wait_after_a_short_one_is_spun_until_somebody_is_told() -> None:
    spun, asked = wakeups_of_layers(spin_us=100_000, num_layers=50)
    assert spun < 10
    assert asked, "it spins though all has been told"
    slept, asked = wakeups_of_layers(spin_us=0, num_layers=50)
    assert slept >= 50
    assert asked


@pytest.mark.parametrize(
    ("layout", "name", "skipped"), [(WRITE, "struct pdd_write", "reserved"), (EVENT, "struct pdd_event", "slot")]
)
def test_a_packed_struct_is_the_one_of_the_header(layout: struct.Struct, name: str, skipped: str) -> None:
    """Python packs and unpacks it at once, by a layout of its own: each field at its place, and none left out."""
    value = ffi.new(f"{name} *")
    fields = [(key, field) for key, field in ffi.typeof(name).fields if key != skipped]
    for number, (key, field) in enumerate(fields, start=1):
        setattr(value, key, ffi.cast(field.type, number))
    assert layout.unpack(bytes(ffi.buffer(value))) == tuple(range(1, len(fields) + 1))
