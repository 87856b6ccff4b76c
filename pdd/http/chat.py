"""`pdd chat`: one streamed chat request, printed as it comes; a client like any other."""

from __future__ import annotations

import argparse
import asyncio
import ssl
import sys

import aiohttp
import msgspec

from pdd.base.errors import NoPath
from pdd.http.keys import read_keys
from pdd.topology.model import Http, Topology
from pdd.wire.tls import pinned_context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="what to say; - reads it from standard input")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)


def http_of(topology: Topology) -> Http:
    """Where the cluster answers: the first node with an HTTP port. Every loaded topology has one."""
    return next(node.http for node in topology.nodes.values() if node.http is not None)


def run(topology: Topology, args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    body = {
        "model": topology.model.name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    http = http_of(topology)
    keys = [] if http.api_key_file is None else read_keys(http.api_key_file)
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    trust = True if http.tls is None else pinned_context(http.tls.certificate_file)
    return asyncio.run(_chat(http.url, trust, headers, body))


async def _chat(url: str, trust: ssl.SSLContext | bool, headers: dict[str, str], body: dict[str, object]) -> int:
    """`trust`: the context of an https URL; True, aiohttp's default, matters to no other."""
    try:
        async with (
            aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=trust)) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status != 200:
                print(f"{url} answered {response.status}: {await response.text()}", file=sys.stderr)
                return 1
            failed = False
            async for line in response.content:
                failed |= _show(line)
    except aiohttp.ClientConnectionError as error:
        raise NoPath(f"{url} does not answer ({error}); is the cluster up?") from error
    print(f"\nrequest {response.headers.get('x-request-id', '?')}", file=sys.stderr)
    return int(failed)


def _show(line: bytes) -> bool:
    """Prints what a line of the event stream adds. True when it tells of an error."""
    data = line.removeprefix(b"data: ").strip()
    if not line.startswith(b"data: ") or data == b"[DONE]":
        return False
    event = msgspec.json.decode(data)
    if error := event.get("error"):
        print(f"\nerror: {error['message']}", file=sys.stderr)
        return True
    for choice in event["choices"]:
        print(choice["delta"].get("content") or "", end="", flush=True)
    return False
