"""The words of the topology file: what an operator writes is exactly these frozen structs.

Only pdd/topology/load.py builds them, from YAML; nobody changes them afterwards. Fields that end in `_bytes` accept
a number or a text such as `512 MiB`; fields that end in `_s` are seconds.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from pdd.base.ids import NodeName, ReplicaName, replica_name


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class Provider(StrEnum):
    TCP = "tcp"
    SHM = "shm"


class OnHandoffFailure(StrEnum):
    RECOMPUTE = "recompute"
    ERROR = "error"


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "pdd"
    """Daemons of different clusters refuse each other."""
    key_file: Path
    """Shared secret of all daemons, mode 0600; relative to the topology file. `pdd up` makes it when absent."""
    run_dir: Path | None = None
    """Where admin sockets live; None: $XDG_RUNTIME_DIR/pdd/<name>, or /tmp/pdd-<uid>/<name>."""
    heartbeat_s: float = 0.5
    """Each link sends one this often."""
    silence_s: float = 3.0
    """A peer that sent nothing for this long is lost."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    """What clients write in `model`."""
    path: Path
    """A Hugging Face directory or a .gguf file; relative to the topology file; `~` is expanded."""
    dtype: str = "float32"
    """Computation and KV cache: float32 or bfloat16."""
    max_sequence_tokens: int | None = None
    """Prompt and answer together; None: what the model was trained for."""


class Fabric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    provider: Provider = Provider.TCP
    spin_us: int = 0
    """How long the progress thread polls before it blocks; 0 costs nothing when idle."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    local_prefill_tokens: int = 32
    """A prompt with at most this many tokens not yet cached on the decoder is prefilled there."""
    lease_s: float = 60.0
    """A prefill that has not delivered by then is cancelled."""
    retries: int = 1
    """Other attempts at a failed handoff before `on_failure` applies."""
    on_failure: OnHandoffFailure = OnHandoffFailure.RECOMPUTE


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_queue: int = 256
    """Requests that wait for pages on one replica before new ones get 429."""
    timeout_s: float = 600.0
    """Deadline of a request that names none."""
    max_body_bytes: int = 8 * 1024 * 1024


class Http(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int
    api_key_file: Path | None = None
    """One key a line; None: no key is asked for."""


class Parallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tp: int = 1
    dp: int = 1
    ep: int = 1


class Replica(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Role
    parallel: Parallel = Parallel()
    cores: tuple[int, ...] = ()
    """Cores its executors are pinned to; empty: all of them."""
    threads: int | None = None
    """Compute threads of each executor; None: as many as `cores`."""
    page_tokens: int = 16
    kv_bytes: int = 256 * 1024 * 1024
    """KV memory of each rank."""
    chunk_tokens: int = 256
    """Most prompt tokens in one step."""
    max_sequences: int = 16
    """Most sequences that hold pages at once."""
    prefix_cache: bool = True


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    """Address the control port and the fabric listen on, and where peers find it."""
    control_port: int
    http: Http | None = None
    replicas: tuple[Replica, ...] = ()


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    cluster: Cluster
    model: Model
    fabric: Fabric = Fabric()
    handoff: Handoff = Handoff()
    limits: Limits = Limits()
    nodes: dict[NodeName, Node]

    def replicas(self, node: NodeName) -> dict[ReplicaName, Replica]:
        """The replicas of one node by name, in the order of the file."""
        return {replica_name(node, index): replica for index, replica in enumerate(self.nodes[node].replicas)}
