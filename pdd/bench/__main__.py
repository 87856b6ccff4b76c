"""`python -m pdd.bench WHAT`, which `pdd bench WHAT` runs: only what is asked for is loaded."""

from __future__ import annotations

import argparse
import importlib
import sys

from pdd.base.errors import PddError

BENCHES = {
    "fabric": "one-sided page writes between two processes, by provider and page size",
    "watch": "from a layer counter's change to the first write posted",
    "transfer": "a handoff between two shapes, without a model",
    "engine": "prefill and decode on this machine, against a plain torch loop",
    "serve": "latency and throughput of any OpenAI server under load",
}


def main() -> int:
    """Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted."""
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what not in BENCHES:
        print("usage: pdd bench WHAT [OPTIONS]\n", file=sys.stderr)
        for name, text in BENCHES.items():
            print(f"  {name:8} {text}", file=sys.stderr)
        return 0 if what in {"-h", "--help"} else 2
    bench = importlib.import_module(f"pdd.bench.{what}")
    parser = argparse.ArgumentParser(prog=f"pdd bench {what}", description=BENCHES[what])
    bench.add_arguments(parser)
    try:
        code: int = bench.run(parser.parse_args(sys.argv[2:]))
    except PddError as error:
        print(f"pdd bench {what}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
