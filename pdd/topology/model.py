"""The words of the topology file: what an operator writes is exactly these frozen structs.

Only pdd/topology/load.py builds them, from YAML; nobody changes them afterwards. Fields that end in `_bytes` accept
a number or a text such as `512 MiB`; fields that end in `_s` are seconds. The ranges in the types are what load.py
enforces and what schema.json shows; rules between fields are in check.py.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdd.base.ids import NodeName, ReplicaName, replica_name

SIZE_PATTERN = r"^([1-9][0-9]{0,14}) ?(KiB|MiB|GiB)$"
"""A size as text: a whole number and a binary unit."""

NonEmpty = Annotated[str, Meta(min_length=1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Ranks = Annotated[int, Meta(ge=1, le=128)]
"""More are no replica of one machine."""
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Bytes = Annotated[
    int,
    Meta(
        ge=1,
        le=2**50,
        extra={"unit": "bytes"},
        extra_json_schema={"pattern": SIZE_PATTERN},
    ),
]


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class Provider(StrEnum):
    TCP = "tcp"
    SHM = "shm"
    EFA = "efa"
    VERBS = "verbs"


class SameHost(StrEnum):
    COPY = "copy"
    FABRIC = "fabric"


class OnHandoffFailure(StrEnum):
    RECOMPUTE = "recompute"
    ERROR = "error"


class Certificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    certificate_file: Path
    """PEM: the certificate, then those between it and its authority; relative to the topology file."""
    key_file: Path
    """PEM: its private key without a passphrase, mode 0600."""


class ClusterTls(Certificate, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ca_file: Path
    """PEM: the authority that signed the certificates of all nodes; both ends of a link check against it."""


class Verify(StrEnum):
    NONE = "none"
    PAGES = "pages"


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: NonEmpty = "pdd"
    """Daemons of different clusters refuse each other."""
    key_file: Path
    """Shared secret of all daemons, mode 0600; relative to the topology file. `pdd up` makes it when absent."""
    tls: ClusterTls | None = None
    """Certificate of the node that reads this; None: control links are not encrypted."""
    run_dir: Path | None = None
    """Where admin sockets live; None: $XDG_RUNTIME_DIR/pdd/<name>, or /tmp/pdd-<uid>/<name>."""
    heartbeat_s: Seconds = 0.5
    """Each link sends one this often."""
    silence_s: Seconds = 3.0
    """A peer that sent nothing for this long is lost."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: NonEmpty
    """What clients write in `model`."""
    path: Path
    """A Hugging Face directory or a .gguf file; relative to the topology file; `~` is expanded."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Computation and KV cache: float32 or bfloat16."""
    max_sequence_tokens: Annotated[int, Meta(ge=2)] | None = None
    """Prompt and answer together; None: what the model was trained for."""


class Fabric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    provider: Provider = Provider.TCP
    """What carries the KV pages: tcp works everywhere, shm inside one machine; efa (AWS) and verbs (ConnectX, others)
    are RDMA NICs, on which pdd has not run yet."""
    same_host: SameHost = SameHost.COPY
    """Between replicas of one machine and user. copy: the decoder's fabric thread copies the pages from the prefiller's
    memory, which it has mapped; no NIC is used. fabric: they go through the provider, as between machines."""
    spin_us: Annotated[int, Meta(ge=0, le=1_000_000)] = 200
    """To be woken costs more than a short wait: a wait of the progress thread that follows one shorter than this is
    spun, as long as this at most. When idle it sleeps. 0: it always sleeps."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    local_prefill_tokens: Natural = 32
    """A prompt with at most this many tokens not yet cached on the decoder is prefilled there."""
    lease_s: Seconds = 60.0
    """A prefill that has not delivered by then is cancelled."""
    retries: Natural = 1
    """Other attempts at a failed handoff before `on_failure` applies; also at a request whose decoder is lost before
    the first token."""
    on_failure: OnHandoffFailure = OnHandoffFailure.RECOMPUTE
    """recompute: the decoder prefills the prompt itself. error: the client gets one."""
    verify: Verify = Verify.NONE
    """pages: both sides hash each handoff's pages, and one whose hashes differ has failed. none: the fabric is trusted
    with the bytes."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_queue: Natural = 256
    """Requests that wait for pages on one replica before new ones get 429."""
    timeout_s: Seconds = 600.0
    """Deadline of every request, from its arrival to its last token; a client cannot name another."""
    step_s: Seconds = 30.0
    """A step that takes longer means that its executor is stuck: the replica fails and is started again."""
    answer_s: Seconds = 10.0
    """An executor without work is asked every second whether it is there. One that takes longer to answer is stuck."""
    load_s: Seconds = 600.0
    """Executors whose model is not loaded by then have failed to start."""
    drain_s: Seconds = 30.0
    """How long a daemon that was told to stop lets running requests go on."""
    max_body_bytes: Bytes = 8 * 1024 * 1024
    """Larger HTTP bodies get 413."""
    max_connections: Positive = 4096
    """HTTP connections to one node at once; further ones are closed."""
    header_s: Seconds = 20.0
    """A client that has not sent the whole head of its next request by then is disconnected."""


class Http(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: NonEmpty = "127.0.0.1"
    """Address that clients connect to; 0.0.0.0 is every address of the machine."""
    port: Port
    api_key_file: Path | None = None
    """One key a line; None: no key is asked for."""
    tls: Certificate | None = None
    """None: HTTP is not encrypted."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls is None else 'https'}://{host}:{self.port}"


class Parallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tp: Ranks = 1
    """Ranks that share every layer, and with it each page of KV cache: a replica set."""
    dp: Ranks = 1
    """Replica sets, each with requests and KV memory of its own."""
    ep: Ranks = 1
    """Ranks that share the experts of a mixture-of-experts model: all `tp * dp` of them, or 1: each set has all."""

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp


class Replica(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Role
    """prefill and decode hand over to each other; a colocated replica does both phases."""
    parallel: Parallel = Parallel()
    cores: tuple[Natural, ...] = ()
    """Cores its executors are pinned to; empty: all of them."""
    threads: Positive | None = None
    """Compute threads of each executor; None: as many as `cores`."""
    nics: Literal["auto"] | tuple[NonEmpty | tuple[NonEmpty, ...], ...] = "auto"
    """For each rank its NIC, or the list of NICs that it uses in parallel: names of network interfaces, or IPv4
    addresses of theirs. auto: each rank listens on the node's `host`."""
    progress_cores: Literal["auto"] | tuple[Natural | tuple[Natural, ...], ...] = "auto"
    """For each rank the core, or the list of cores, that its progress threads may run on. auto: the cores of its NICs'
    NUMA nodes that no `cores` on this machine names. Where there are none, and for `[]`, the threads run anywhere."""
    page_tokens: Positive = 16
    """Tokens of KV in a page: a power of two up to 256. Prefill and decode replicas may differ."""
    kv_bytes: Bytes = 256 * 1024 * 1024
    """KV memory of each rank."""
    chunk_tokens: Positive = 256
    """Most prompt tokens in one step."""
    max_sequences: Positive = 16
    """Most sequences that hold pages at once."""
    prefix_cache: bool = True
    """Keeps the KV of ended requests findable by their tokens, until the pages are needed."""

    @property
    def nics_by_rank(self) -> tuple[tuple[str, ...], ...]:
        """The names, for each rank; empty where that is left to `auto`."""
        if self.nics == "auto":
            return ()
        return tuple((names,) if isinstance(names, str) else names for names in self.nics)

    @property
    def progress_cores_by_rank(self) -> tuple[tuple[int, ...], ...] | None:
        """None: left to `auto`."""
        if self.progress_cores == "auto":
            return None
        return tuple((cores,) if isinstance(cores, int) else cores for cores in self.progress_cores)


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: NonEmpty = "127.0.0.1"
    """Address the control port and the fabric listen on, and where peers find it."""
    control_port: Port
    """TCP port of the links between daemons."""
    http: Http | None = None
    """None: clients cannot connect to this node."""
    replicas: tuple[Replica, ...] = ()
    """May be empty on a node that only serves HTTP."""

    @property
    def machine(self) -> str:
        """Nodes of one machine share its ports and cores."""
        return "loopback" if self.host.startswith("127.") or self.host in {"localhost", "::1"} else self.host


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    """Of this language: 1."""
    cluster: Cluster
    model: Model
    fabric: Fabric = Fabric()
    handoff: Handoff = Handoff()
    limits: Limits = Limits()
    nodes: dict[NodeName, Node]
    """By name; `--node` of a daemon and pdctl's tables use the names."""

    def replicas(self, node: NodeName) -> dict[ReplicaName, Replica]:
        """The replicas of one node by name, in the order of the file."""
        return {replica_name(node, index): replica for index, replica in enumerate(self.nodes[node].replicas)}
