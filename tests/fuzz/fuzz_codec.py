"""Coverage-guided fuzzing of what reads bytes first: the codec, the links' handshake, the topology loader.

    pip install atheris
    PYTHONPATH=. python tests/fuzz/fuzz_codec.py -runs=100000 [corpus directory] [libFuzzer options]

The first byte of an input chooses the target; every error but those that the target promises is a finding. Without
atheris (it is no dependency) the program says so and ends with success, so that scripts may always call it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEY = b"k" * 32
KNOWN_NONCE = b"n" * 32


def targets() -> list[Callable[[bytes], None]]:
    """Imports pdd, so that whoever calls it may have it instrumented."""
    from pdd.base.errors import HandshakeRefused, RemoteProtocolError, TopologyInvalid  # noqa: PLC0415
    from pdd.base.ids import Incarnation, NodeName  # noqa: PLC0415
    from pdd.topology.load import load  # noqa: PLC0415
    from pdd.wire.codec import MAX_FRAME_BYTES, Decoder, encode  # noqa: PLC0415
    from pdd.wire.handshake import Handshake, Side  # noqa: PLC0415

    file = Path(tempfile.mkdtemp(prefix="pdd-fuzz-")) / "topology.yaml"

    def read(data: bytes, *, authenticated: bool) -> None:
        decoder = Decoder()
        if authenticated:
            decoder.authenticated()
        with contextlib.suppress(RemoteProtocolError):
            for start in range(0, len(data), 61):
                for message in decoder.feed(data[start : start + 61]):
                    encode(message)
        if len(decoder._buffer) > 4 + MAX_FRAME_BYTES:
            raise AssertionError("more than a frame is held")

    def shake_hands(data: bytes) -> None:
        handshake = Handshake(side=Side.ACCEPTOR, node=NodeName("b"), incarnation=Incarnation("0" * 16), cluster="c",
                              key=KEY, expected=(NodeName("a"),))  # fmt: skip
        with contextlib.suppress(RemoteProtocolError, HandshakeRefused):
            for message in Decoder().feed(data):
                handshake.receive(message)
        if handshake.done:
            raise AssertionError("somebody without the key got in")

    def load_topology(data: bytes) -> None:
        file.write_bytes(data)
        with contextlib.suppress(TopologyInvalid):
            load(file)

    return [
        lambda data: read(data, authenticated=False),
        lambda data: read(data, authenticated=True),
        shake_hands,
        load_topology,
    ]


def seeds() -> list[bytes]:
    """Inputs to start from: a hello with its proof, and a topology."""
    from pdd.base.ids import Incarnation, NodeName, RequestId  # noqa: PLC0415
    from pdd.wire.codec import encode  # noqa: PLC0415
    from pdd.wire.messages import PROTOCOL, Cancel, Hello, Proof  # noqa: PLC0415

    hello = Hello(protocol=PROTOCOL, cluster="c", node=NodeName("a"), incarnation=Incarnation("1" * 16),
                  nonce=KNOWN_NONCE)  # fmt: skip
    frames = encode(hello) + encode(Proof(mac=b"m" * 32))
    topologies = sorted((Path(__file__).parents[2] / "topology").glob("*.yaml"))
    return [
        b"\x00" + frames,
        b"\x01" + encode(Cancel(request=RequestId("r"), stopped=False)),
        b"\x02" + frames,
        *(b"\x03" + path.read_bytes() for path in topologies),
    ]


def main(arguments: list[str]) -> int:
    try:
        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        print("skipped: atheris is not installed (pip install atheris)")
        return 0
    with atheris.instrument_imports(include=["pdd"]):
        chosen = targets()

    def one_input(data: bytes) -> None:
        if data:
            chosen[data[0] % len(chosen)](data[1:])

    with tempfile.TemporaryDirectory(prefix="pdd-corpus-") as corpus:
        for number, seed in enumerate(seeds()):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.Setup([*arguments, corpus], one_input)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
