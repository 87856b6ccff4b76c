"""One layer counter for all source ranks, over real ports: each port is woken through an eventfd of its own."""

from __future__ import annotations

import select

from transfer_shapes import make_shape

from pdd.base.ids import Incarnation, PageId, ReplicaName, RequestId
from pdd.bench.transfer import Side
from pdd.fabric.libfabric import PROVIDERS
from pdd.memory.arena import LayerCounter, WakeFd
from pdd.topology.model import Provider
from pdd.transfer.group import Arrived, MessengerGroup, Sent, TransferEvent
from pdd.transfer.messenger import Messenger
from pdd.wire.messages import PrefillRequest

R, REPLICA = RequestId("r"), ReplicaName("decode/0")
DECODER, PREFILLER = Incarnation("d" * 16), Incarnation("e" * 16)
PATIENCE_S = 20.0
SOURCE, TARGET = make_shape(2, 2, num_layers=3), make_shape(1, 2, num_layers=3)


def wait(*groups: MessengerGroup, until: int) -> list[TransferEvent]:
    events: list[TransferEvent] = []
    while len(events) < until:
        events += [event for group in groups for event in group.poll()]
        filenos = [fileno for group in groups for fileno in group.filenos()]
        assert len(events) >= until or select.select(filenos, [], [], PATIENCE_S)[0], events
    return events


def test_every_port_sends_a_layer_when_the_lead_has_raised_the_counter() -> None:
    target, source = (Side(PROVIDERS[Provider.TCP], shape) for shape in (TARGET, SOURCE))
    counter, wakes = LayerCounter.create(), [WakeFd.create() for _ in source.ports]
    watches = [port.watch(counter.address, wake.fd) for port, wake in zip(source.ports, wakes, strict=True)]
    ranks = [Messenger(port, SOURCE.layout, arena.address, watch)
             for port, arena, watch in zip(source.ports, source.arenas, watches, strict=True)]  # fmt: skip
    group = MessengerGroup(SOURCE, ranks)
    (grant,) = target.group.grants(PREFILLER, REPLICA)
    group.connect(DECODER, grant)
    try:
        immediates = target.group.arm(R, PREFILLER, SOURCE, 0, 8)
        ticket = PrefillRequest(
            request=R, source_replica=ReplicaName("prefill/0"), target_replica=REPLICA, target_incarnation=DECODER,
            shape_digest=TARGET.digest(), seed=0, prompt=(0,) * 9, start_token=0,
            target_pages=(PageId(5), PageId(2)), immediates=immediates, lease_s=1.0,
        )  # fmt: skip
        group.accept(ticket, DECODER, TARGET)
        group.announce(R, 0, 8, last=True, pages=[PageId(0), PageId(1)], counter_base=0)
        for layer in range(SOURCE.layout.num_layers):
            assert target.group.arrived(R)[0] <= layer * 8, "nothing leaves before its layer is there"
            for rank in range(SOURCE.tp):
                source.cache(rank)[layer, :2] = 10 * rank + layer + 1
            counter.add(1)
            for wake in wakes:
                wake.notify()
        events = wait(group, target.group, until=2)
        assert {type(event) for event in events} == {Sent, Arrived}
        for layer in range(SOURCE.layout.num_layers):
            for head in range(2):
                assert (target.cache(0)[layer, [5, 2], :, head] == 10 * head + layer + 1).all()
    finally:
        group.close()
        target.group.close()
        for wake in wakes:
            wake.close()
        counter.close()
