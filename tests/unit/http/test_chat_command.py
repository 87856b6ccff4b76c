from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest
from conftest import Serve
from http_fakes import failure, outputs_of

from pdd.base.errors import NoPath
from pdd.base.ids import NodeName
from pdd.http import chat
from pdd.topology.model import Cluster, Http, Model, Node, Topology


def topology(port: int, api_key_file: Path | None = None) -> Topology:
    return Topology(
        version=1,
        cluster=Cluster(key_file=Path("key")),
        model=Model(name="m", path=Path("m")),
        nodes={
            NodeName("p"): Node(control_port=1),
            NodeName("d"): Node(control_port=2, http=Http(port=port, api_key_file=api_key_file)),
        },
    )


async def ask(topology: Topology) -> int:
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    return await asyncio.to_thread(chat.run, topology, parser.parse_args(["What jumps?"]))


async def test_it_prints_the_answer(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    served = await serve("the fox 🦊", http=Http(port=0, api_key_file=keys))
    assert await ask(topology(served.server.port, keys)) == 0
    out, err = capsys.readouterr()
    assert out.strip() == "the fox 🦊"
    assert served.generator.requests[0].id in err


async def test_it_fails_with_the_stream(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = await serve(lambda request: [*outputs_of(request, [300, 301])[:1], failure(request)])
    assert await ask(topology(served.server.port)) == 1
    assert "the prefiller went away" in capsys.readouterr().err


async def test_nobody_answers(serve: Serve) -> None:
    served = await serve()
    port = served.server.port
    await served.server.stop()
    with pytest.raises(NoPath, match="is the cluster up"):
        await ask(topology(port))
