"""`pdd`: daemons, and what is run beside them. Operators talk to running daemons with `pdctl`."""

from __future__ import annotations

# ruff: noqa: E402 - an interrupt while the rest is imported, which takes a while, ends us without a traceback
import signal

_interrupted = signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import asyncio
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import rich.progress
import uvloop

import pdd
from pdd.base.errors import OperatorError, PddError
from pdd.base.ids import NodeName
from pdd.base.process import die_with_parent
from pdd.bench import soak
from pdd.daemon.gateway import Gateway
from pdd.daemon.main import Daemon, check_shapes, max_sequence_tokens
from pdd.daemon.service import allow_descriptors, set_up_logs
from pdd.daemon.up import run_nodes
from pdd.engine.pack import PackedModel, pack
from pdd.engine.weights.cache import default_cache
from pdd.http import chat
from pdd.http.plan import ServedModel
from pdd.http.server import HttpServer
from pdd.http.text import open_text
from pdd.topology.check import check_local
from pdd.topology.load import load
from pdd.topology.model import Http, Topology
from pdd.wire.keyfile import ensure_key, load_key
from pdd.wire.tls import LinkTls

signal.signal(signal.SIGINT, _interrupted)

_TOPOLOGY = "topology file (YAML)"
Command = Callable[[argparse.Namespace], int]


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 usage, 4 topology, model or key file invalid."""
    args = _parser().parse_args(argv)
    command: Command = args.command
    try:
        return command(args)
    except PddError as error:
        print(f"pdd: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, OperatorError) else 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in {errno.EMFILE, errno.ENFILE}:
            raise
        print(f"pdd: {error.strerror}: raise the limit on file descriptors (ulimit -n)", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdd", description="Disaggregated prefill/decode serving for LLMs.")
    parser.add_argument("--version", action="version", version=f"pdd {pdd.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str, command: Command) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    daemon = add("daemon", "run one node of a topology", _daemon)
    daemon.add_argument("--topology", required=True, type=Path, help=_TOPOLOGY)
    daemon.add_argument("--node", required=True, type=NodeName, help="which of its nodes this is")
    daemon.add_argument("--end-with-parent", action="store_true", help="stop when the process that started it ends")
    up = add("up", "run all nodes of a topology on this machine", _up)
    up.add_argument("topology", type=Path, help=_TOPOLOGY)
    for sub in (daemon, up):
        sub.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    prepare = add("prepare", "convert the model of a topology once, before any daemon needs it", _prepare)
    prepare.add_argument("topology", type=Path, help=_TOPOLOGY)
    talk = add("chat", "send one chat request and print the answer as it comes", _chat)
    talk.add_argument("--topology", required=True, type=Path, help=_TOPOLOGY)
    chat.add_arguments(talk)
    soak.add_arguments(
        add("soak", "run a toy cluster under traffic and faults; count wrong answers and leaks", soak.run)
    )
    bench = add("bench", "measure: fabric, engine or serve; `pdd bench` alone says more", _bench)
    bench.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _daemon(args: argparse.Namespace) -> int:
    allow_descriptors()
    topology = load(args.topology)
    if args.node not in topology.nodes:
        names = ", ".join(topology.nodes)
        raise OperatorError(f"{args.topology} has no node {args.node}; it has {names}")
    check_local(topology, args.node)
    if args.end_with_parent:
        die_with_parent(signal.SIGTERM)
    key = load_key(topology.cluster.key_file)
    tls = None if topology.cluster.tls is None else LinkTls(topology.cluster.tls)
    model = _packed(topology)
    check_shapes(topology, model)
    logs = set_up_logs(args.log_level, node=args.node)

    def make_http(gateway: Gateway, http: Http) -> HttpServer:
        served = _served(topology, model)
        return HttpServer(gateway, served, http=http, limits=topology.limits)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Daemon(topology, args.node, model, key=key, tls=tls, logs=logs, make_http=make_http).run())
    return 0


def _served(topology: Topology, model: PackedModel) -> ServedModel:
    return ServedModel(
        name=topology.model.name,
        text=open_text(model.text, tokenizer_file=model.tokenizer, vocab_size=model.config.vocab_size),
        max_sequence_tokens=max_sequence_tokens(topology, model),
    )


def _up(args: argparse.Namespace) -> int:
    topology = load(args.topology)
    for node in topology.nodes:
        check_local(topology, node)
    ensure_key(topology.cluster.key_file)
    check_shapes(topology, _packed(topology))  # packed once, with a progress bar, before the daemons all wait for it
    set_up_logs(args.log_level, node="up")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_nodes(args.topology, topology, args.log_level))
    return 0


def _prepare(args: argparse.Namespace) -> int:
    model = _packed(load(args.topology))
    print(f"{model.dir}: {model.dtype}, digest {model.digest}")
    return 0


def _packed(topology: Topology) -> PackedModel:
    cache = default_cache()
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
        console=rich.console.Console(stderr=True),
        transient=True,
    )
    tasks: dict[str, rich.progress.TaskID] = {}

    def progress(stage: str, fraction: float) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(f"{stage} {topology.model.path.name}", total=1.0)
        bar.update(tasks[stage], completed=fraction)

    if not sys.stderr.isatty():
        return pack(topology.model.path, topology.model.dtype, cache)
    with bar:
        return pack(topology.model.path, topology.model.dtype, cache, progress)


def _chat(args: argparse.Namespace) -> int:
    return chat.run(load(args.topology), args)


def _bench(args: argparse.Namespace) -> int:
    """Benches are programs of their own: one of them needs torch, which nothing else here may load."""
    os.execv(sys.executable, [sys.executable, "-m", "pdd.bench", *args.rest])  # noqa: S606


if __name__ == "__main__":
    sys.exit(main())
