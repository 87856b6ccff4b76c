"""What Prometheus reads: names in the style of `vllm:`, with the prefix `pdd:`; one registry for each daemon.

docs/metrics.md is rendered from the registry and tested equal.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Metrics:
    """All series of one daemon. Attributes are named like the series, without the prefix."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry(auto_describe=True)

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"pdd:{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
            return Gauge(f"pdd:{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, labels: Iterable[str] = ()) -> Histogram:
            return Histogram(f"pdd:{name}", text, labels, buckets=_LATENCY_S, registry=registry)

        self.time_to_first_token = seconds("time_to_first_token_seconds", "From submission to the first token (TTFT)")
        self.time_per_output_token = seconds(
            "time_per_output_token_seconds", "Mean time of a request's tokens after the first (TPOT)"
        )
        self.inter_token_latency = seconds("inter_token_latency_seconds", "Time between two tokens of a request (ITL)")
        self.e2e_request_latency = seconds("e2e_request_latency_seconds", "From submission to the last token")
        self.request_state = seconds(
            "request_state_seconds", "Time that ended requests spent in each state", ("side", "state")
        )
        self.ready_after_prefill = seconds(
            "ready_after_prefill_seconds", "From the news of the prefill's end to the last page's arrival"
        )
        self.request_prompt_tokens = Histogram(
            "pdd:request_prompt_tokens", "Prompt tokens of a request", buckets=_TOKENS, registry=registry
        )
        self.request_generation_tokens = Histogram(
            "pdd:request_generation_tokens", "Output tokens of a request", buckets=_TOKENS, registry=registry
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = counter("generation_tokens", "Tokens sampled")
        self.requests_ended = counter("requests_ended", "Requests by side and last state", ("side", "state"))
        self.prefill_decisions = counter("prefill_decisions", "Where prompts were prefilled, and why", ("where", "why"))
        self.handoffs = counter("handoffs", "Handoffs by outcome", ("outcome",))
        self.handoff_bytes = counter("handoff_bytes", "Bytes of KV cache by direction", ("direction",))
        self.handoff_pieces = counter(
            "handoff_pieces", "Pieces by direction: pages of one layer, between equal shapes", ("direction",)
        )
        self.prefillers_left_out = counter(
            "prefillers_left_out", "Times that a prefiller was not asked because its pages had not arrived lately"
        )
        self.stray_writes = counter("stray_writes", "Pieces that arrived for no open handoff")
        self.stale_messages = counter("stale_messages", "Control messages for handoffs that were over", ("message",))
        self.preemptions = counter("preemptions", "Sequences that lost their pages to an older one")
        self.broken_invariants = counter("broken_invariants", "Contradictions in the daemon's own books: each is a bug")
        self.requests_moved = counter(
            "requests_moved", "Requests asked of another decode replica, by the first one's error", ("code",)
        )
        self.replica_restarts = counter("replica_restarts", "Failed replicas that came up again", ("replica",))
        self.steps = counter("steps", "Steps run by executors", ("replica",))
        self.step_compute = seconds("step_compute_seconds", "Compute time of a step in the executor", ("role",))
        self.requests_in_state = gauge("requests_in_state", "Requests that have not ended", ("side", "state"))
        self.pages = gauge("pages", "KV pages by what they are used for", ("replica", "use"))
        self.prefix_cache_tokens = gauge(
            "prefix_cache_tokens", "Prompt tokens looked up in the prefix cache, and found", ("replica", "what")
        )
        self.log_lines_lost = counter("log_lines_lost", "Log lines that nobody read in time, or could not be written")
        self.admin_refused = counter("admin_refused", "Processes of other users that were refused at the admin socket")
        self.transfer_oddities = gauge(
            "transfer_oddities", "What messengers have met besides handoffs, since their replica came up",
            ("replica", "kind"),
        )  # fmt: skip
        self.fabric = gauge(
            "fabric", "What the fabric ports of a replica have counted since it came up", ("replica", "kind")
        )
        self.link_faults = gauge("link_faults", "Faults of control links since the start", ("kind",))
        self.peers_up = gauge("peers_up", "Control links that are up")
        self.ready = gauge("ready", "1 when the daemon can serve")

    def text(self) -> bytes:
        return generate_latest(self.registry)


def render(metrics: Metrics) -> str:
    """All series as a Markdown table."""
    lines = ["| series | type | labels | what |", "|---|---|---|---|"]
    for family in metrics.registry.collect():
        labels = getattr(metrics, _attribute(metrics, family.name))._labelnames
        lines.append(f"| `{family.name}` | {family.type} | {', '.join(labels)} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def _attribute(metrics: Metrics, name: str) -> str:
    return next(key for key, value in vars(metrics).items() if getattr(value, "_name", None) == name)
