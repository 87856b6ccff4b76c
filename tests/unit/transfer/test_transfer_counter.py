"""One layer counter for all source ranks, over real ports: each port is woken through an eventfd of its own."""

from __future__ import annotations

import select
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from transfer_shapes import make_shape

from pdd.base.ids import Incarnation, PageId, ReplicaName, RequestId
from pdd.fabric.libfabric import LibfabricPort
from pdd.fabric.port import PeerInfo, Watch
from pdd.memory.arena import Arena, LayerCounter, WakeFd
from pdd.memory.shape import KvShape
from pdd.topology.model import Provider
from pdd.transfer.group import Arrived, MessengerGroup, Sent, TransferEvent
from pdd.transfer.messenger import Messenger
from pdd.wire.messages import PrefillRequest

R, REPLICA = RequestId("r"), ReplicaName("decode/0")
DECODER, PREFILLER = Incarnation("d" * 16), Incarnation("e" * 16)
PATIENCE_S = 20.0
SOURCE, TARGET = make_shape(2, 2, num_layers=3), make_shape(1, 2, num_layers=3)


class Side:
    """A replica set whose ranks have two NICs each, and arenas that ports of this machine may read from."""

    def __init__(self, shape: KvShape, *, copies: bool) -> None:
        self.shape = shape
        self.arenas = [Arena.create(shape.layout) for _ in range(shape.tp)]
        hosts = ("127.0.0.1", "127.0.0.2")
        self.ports = [LibfabricPort.open(Provider.TCP, hosts, spin_us=0, copies=copies) for _ in self.arenas]

    def group(self, watches: Sequence[Watch | None]) -> MessengerGroup:
        messengers = [Messenger(port, self.shape.layout, arena.address, watch, arena_fd=arena.fd)
                      for port, arena, watch in zip(self.ports, self.arenas, watches, strict=True)]  # fmt: skip
        return MessengerGroup(self.shape, messengers)

    def cache(self, rank: int) -> npt.NDArray[np.uint8]:
        """[layer, page, plane, head, the rest], a copy."""
        layout = self.shape.layout
        size = layout.num_layers, layout.num_pages, layout.num_planes, layout.num_kv_heads, -1
        return np.frombuffer(bytes(self.arenas[rank].buffer()), np.uint8).reshape(size)

    def fill(self, rank: int, layer: int, num_pages: int, value: int) -> None:
        layout = self.shape.layout
        start = layout.offset_bytes(layer, 0)
        length = num_pages * layout.page_bytes
        self.arenas[rank].buffer()[start : start + length] = bytes([value]) * length


def wait(*groups: MessengerGroup, until: int) -> list[TransferEvent]:
    events: list[TransferEvent] = []
    while len(events) < until:
        events += [event for group in groups for event in group.poll()]
        filenos = [fileno for group in groups for fileno in group.filenos()]
        assert len(events) >= until or select.select(filenos, [], [], PATIENCE_S)[0], events
    return events


@pytest.mark.parametrize("copies", [True, False], ids=["copy", "fabric"])
def test_every_port_sends_a_layer_when_the_lead_has_raised_the_counter(copies: bool) -> None:
    target, source = (Side(shape, copies=copies) for shape in (TARGET, SOURCE))
    counter, wakes = LayerCounter.create(), [WakeFd.create() for _ in source.ports]
    receiving = target.group([None])
    sending = source.group(
        [port.watch(counter.address, wake.fd) for port, wake in zip(source.ports, wakes, strict=True)]
    )
    (grant,) = receiving.grants(PREFILLER, REPLICA)
    sending.connect(DECODER, grant)
    try:
        immediates = receiving.arm(R, PREFILLER, SOURCE, 0, 8)
        ticket = PrefillRequest(
            request=R, source_replica=ReplicaName("prefill/0"), target_replica=REPLICA, target_incarnation=DECODER,
            shape_digest=TARGET.digest(), seed=0, prompt=(0,) * 9, start_token=0,
            target_pages=(PageId(5), PageId(2)), immediates=immediates, lease_s=1.0,
        )  # fmt: skip
        sending.accept(ticket, DECODER, TARGET)
        sending.announce(R, 0, 8, last=True, pages=[PageId(0), PageId(1)], counter_base=0)
        for layer in range(SOURCE.layout.num_layers):
            assert receiving.arrived(R)[0] <= layer * 8, "nothing leaves before its layer is there"
            for rank in range(SOURCE.tp):
                source.fill(rank, layer, 2, 10 * rank + layer + 1)
            counter.add(1)
            for wake in wakes:
                wake.notify()
        events = wait(sending, receiving, until=2)
        assert {type(event) for event in events} == {Sent, Arrived}
        assert [way.copies for way in sending.ways(DECODER)] == [copies] * 2
        assert copies or sending.ways(DECODER) == [PeerInfo(copies=False, num_paths=2, num_open=2)] * 2, "NIC to NIC"
        cache = target.cache(0)
        for layer in range(SOURCE.layout.num_layers):
            for head in range(2):
                assert (cache[layer, [5, 2], :, head] == 10 * head + layer + 1).all()
    finally:
        sending.close()
        receiving.close()
        for shared in (counter, *source.arenas, *target.arenas):
            shared.close()
        for wake in wakes:
            wake.close()
