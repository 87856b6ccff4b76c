"""pdctl: what an operator asks a running cluster, and what a topology file says before there is one.

Exit codes: 0 done, 1 refused or failed, 2 usage, 3 unreachable, 4 topology invalid.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

import pdd
from pdd.base.errors import OperatorError
from pdd.control import commands, topology
from pdd.control.commands import Answer, Sockets
from pdd.control.render import as_json, as_yaml, plain
from pdd.control.sockets import find_sockets
from pdd.topology.model import Role

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130

Command = Callable[[argparse.Namespace], Answer]


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    if "command" not in arguments:
        parser.print_help(sys.stderr)
        return USAGE_EXIT_CODE
    try:
        return _watch(arguments) if arguments.watch is not None else _run(arguments)
    except OperatorError as error:
        _complain("", error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except OSError as error:
        return _unwritten(error)


def _unwritten(error: OSError) -> int:
    """Standard output took no more. Without the dup2 Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # `pdctl ... | head`
        return 0
    _complain("", OperatorError(f"cannot write the answer: {error.strerror}"))
    return OperatorError.exit_code


def _run(arguments: argparse.Namespace) -> int:
    command: Command = arguments.command
    answer = command(arguments)
    text = {"table": lambda: answer.text, "json": lambda: as_json(answer.data), "yaml": lambda: as_yaml(answer.data)}
    if output := text[arguments.output]():
        print(output, flush=True)
    for node, error in answer.errors.items():
        _complain(node, error)
    return max((error.exit_code for error in answer.errors.values()), default=0)


def _watch(arguments: argparse.Namespace) -> int:
    """Again and again until Ctrl-C: daemons that come and go are shown as they are."""
    while True:
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[H\x1b[2J")
        try:
            _run(arguments)
        except OperatorError as error:
            _complain("", error)
        try:
            time.sleep(arguments.watch)
        except KeyboardInterrupt:
            return 0


def _complain(node: str, error: OperatorError) -> None:
    where = f"{node}: " if node else ""
    for line in str(error).split("\n"):
        print(f"pdctl: {where}{plain(line)}", file=sys.stderr)


def _asking(command: Callable[..., Answer], *names: str) -> Command:
    """A command that asks daemons; `names` are the arguments that it gets beside the sockets."""

    def run(arguments: argparse.Namespace) -> Answer:
        sockets: Sockets = find_sockets(arguments.socket, arguments.topology, arguments.node)
        return command(sockets, *(getattr(arguments, name) for name in names))

    return run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdctl",
        description="Look at and steer the pdd daemons of this machine.",
        epilog="exit codes: 0 done, 1 refused or failed, 2 usage, 3 unreachable, 4 topology invalid",
    )
    parser.add_argument("--version", action="version", version=f"pdctl {pdd.__version__}")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("-o", dest="output", choices=("table", "json", "yaml"), default="table", help="output format")
    output.set_defaults(watch=None)
    where = argparse.ArgumentParser(add_help=False, parents=[output])
    target = where.add_mutually_exclusive_group()
    target.add_argument("--topology", metavar="FILE", help="the cluster's topology file (default: $PDD_TOPOLOGY)")
    target.add_argument("--socket", metavar="PATH", help="the admin socket of one daemon")
    where.add_argument("--node", metavar="NAME", help="one node only (default: all that run on this machine)")

    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_topology(subparsers.add_parser("topology", help="check or show a topology file"), output)

    def add(name: str, text: str, command: Command) -> argparse.ArgumentParser:
        subparser = subparsers.add_parser(name, help=text, description=text, parents=[where])
        subparser.set_defaults(command=command)
        return subparser

    status = add("status", "nodes, replicas, pages and counters", _asking(commands.status))
    status.add_argument("-w", dest="watch", metavar="SECONDS", type=_interval, help="show again every so often")
    add("requests", "requests that run, and the latest that ended", _asking(commands.requests))
    story = add("story", "where the time of one request went", _asking(commands.story, "request"))
    cancel = add("cancel", "cancel one request", _asking(commands.cancel, "request"))
    for subparser in (story, cancel):
        subparser.add_argument("request", metavar="ID", help="a request id, or a beginning of one that is unique")
    add("kv", "who owns the KV pages", _asking(commands.kv))
    add("peers", "links to other daemons", _asking(commands.peers))
    drain = add("drain", "take no new requests and finish the running ones", _asking(commands.drain, "wait"))
    drain.add_argument("--wait", action="store_true", help="return when nothing is unfinished: it may be stopped")
    add("resume", "take requests again after a drain", _asking(commands.resume))
    return parser


def _add_topology(parser: argparse.ArgumentParser, output: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text, command in (
        ("check", "tell every fault of a file, or that it is valid", lambda a: topology.check(a.file)),
        ("show", "the file as daemons read it, with defaults", lambda a: topology.show(a.file)),
        ("schema", "the JSON Schema of topology files", lambda _: topology.print_schema()),
        (
            "discover",
            "propose a file for this machine's GPUs, NICs and cores",
            lambda a: topology.discover(a.sysfs, a.role),
        ),
    ):
        subparser = subparsers.add_parser(name, help=text, description=text, parents=[output])
        subparser.set_defaults(command=command)
        if name in {"check", "show"}:
            subparser.add_argument("file", metavar="FILE")
        elif name == "discover":
            subparser.add_argument("--sysfs", metavar="DIR", default="/sys", help="another machine's copy of /sys")
            subparser.add_argument(
                "--role", choices=[*map(str, Role)], default="prefill", help="of this machine's replica"
            )


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
