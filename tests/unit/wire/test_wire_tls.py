"""Links over TLS between real sockets, and what each side says when the other's certificates do not fit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import structlog
import uvloop
from certificates import make_authority, make_certificate
from test_wire_links import KEY, A, B, Cluster, Recorder, cancel, until

from pdd.base.errors import CertificateInvalid
from pdd.base.ids import new_incarnation
from pdd.topology.model import ClusterTls
from pdd.wire import links as links_module
from pdd.wire.handshake import Handshake, RefusalCode, Refused, Side
from pdd.wire.links import Links
from pdd.wire.tls import LinkTls, Tls

Files = Callable[..., ClusterTls]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Makes certificates of an authority, `ca` unless another is named."""
    directory = tmp_path_factory.mktemp("certificates")
    authorities: dict[str, Path] = {}

    def make(name: str, authority: str = "ca", days: str = "2") -> ClusterTls:
        if authority not in authorities:
            authorities[authority] = make_authority(directory, authority)
        return make_certificate(directory, name, authorities[authority], days=days)

    return make


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for links in reversed(cluster.started):  # who dials stops first
        await links.close()


@pytest.fixture(autouse=True)
def _quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(links_module, "MAX_BACKOFF_S", 0.02)


async def pair(cluster: Cluster, a_tls: LinkTls | None, b_tls: LinkTls | None) -> tuple[Links, Links, Recorder]:
    user_a = Recorder()
    b = await cluster.node("b", Recorder(), peers={A: ("127.0.0.1", 1)}, tls=b_tls)
    a = await cluster.node("a", user_a, peers={B: ("127.0.0.1", b.port)}, dial=(B,), tls=a_tls)
    return a, b, user_a


async def talk(a_tls: LinkTls, b_tls: LinkTls) -> None:
    cluster = Cluster()
    user_a, user_b = Recorder(), Recorder()
    b = await cluster.node("b", user_b, peers={A: ("127.0.0.1", 1)}, tls=b_tls)
    a = await cluster.node("a", user_a, peers={B: ("127.0.0.1", b.port)}, dial=(B,), tls=a_tls)
    await user_a.until(lambda user: "up" in user.kinds())
    await user_b.until(lambda user: "up" in user.kinds())
    sent = [cancel(str(number) * 1000) for number in range(300)]
    assert all(a.send(B, message) for message in sent)
    assert all(b.send(A, message) for message in sent)
    await user_a.until(lambda user: len(user.messages()) == 300)
    await user_b.until(lambda user: len(user.messages()) == 300)
    assert user_a.messages() == user_b.messages() == sent
    for links in reversed(cluster.started):  # who dials stops first
        await links.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_nodes_with_certificates_of_one_authority_talk(
    files: Files, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(talk(LinkTls(files("a")), LinkTls(files("b"))))


async def test_what_goes_over_the_wire_is_not_readable(cluster: Cluster, files: Files) -> None:
    seen = bytearray()
    b = await cluster.node("b", Recorder(), peers={A: ("127.0.0.1", 1)}, tls=LinkTls(files("b")))

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer_reader, peer_writer = await asyncio.open_connection("127.0.0.1", b.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    seen.extend(data)
                    sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, peer_writer), pump(peer_reader, writer))

    tap = await asyncio.start_server(between, "127.0.0.1", 0)
    user = Recorder()
    address = tap.sockets[0].getsockname()[:2]
    a = await cluster.node("a", user, peers={B: address}, dial=(B,), tls=LinkTls(files("a")))
    await user.until(lambda user: "up" in user.kinds())
    secret = "a-very-secret-request"
    assert a.send(B, cancel(secret))
    await a.close()
    tap.close()
    await tap.wait_closed()
    assert len(seen) > 1000
    assert secret.encode() not in seen
    assert b"incarnation" not in seen


async def test_an_end_without_certificates_is_told_and_tells(cluster: Cluster, files: Files) -> None:
    tls = LinkTls(files("a"))
    a, b, _ = await pair(cluster, tls, None)
    await until(lambda: a.rows()[0].state == "refused" and b.counters.bad_handshakes > 0)
    await a.close()
    assert "the other end does not speak it" in a.rows()[0].reason
    a, b, _ = await pair(cluster, None, tls)
    await until(lambda: a.rows()[0].state == "refused" and b.counters.bad_handshakes > 0)
    assert "this node wants TLS" in a.rows()[0].reason


async def test_a_certificate_of_another_authority_is_refused_by_name(cluster: Cluster, files: Files) -> None:
    own = files("a")
    a, b, _ = await pair(cluster, LinkTls(own), LinkTls(files("stranger", "other")))
    await until(lambda: a.rows()[0].state == "refused" and b.counters.bad_handshakes > 0)
    reason = a.rows()[0].reason
    assert "the peer's certificate is not accepted" in reason
    assert str(own.ca_file) in reason
    assert a.counters.bad_handshakes > 0


async def test_a_dialer_that_the_acceptor_refuses_is_told_so(cluster: Cluster, files: Files, tmp_path: Path) -> None:
    """Its own certificate is of an authority that the acceptor does not have; the acceptor's it accepts."""
    stranger, acceptor = files("stranger", "other"), files("b")
    both = tmp_path / "both.crt"
    both.write_bytes(stranger.ca_file.read_bytes() + acceptor.ca_file.read_bytes())
    a, b, _ = await pair(cluster, LinkTls(msgspec.structs.replace(stranger, ca_file=both)), LinkTls(acceptor))
    await until(lambda: a.rows()[0].state == "refused" and b.counters.bad_handshakes > 0)
    assert "the peer does not accept this node's certificate" in a.rows()[0].reason
    assert "unknown ca" in a.rows()[0].reason


async def test_a_client_without_a_certificate_does_not_get_to_the_handshake(cluster: Cluster, files: Files) -> None:
    tls = files("b")
    b = await cluster.node("b", Recorder(), peers={A: ("127.0.0.1", 1)}, tls=LinkTls(tls))
    context = ssl.create_default_context(cafile=str(tls.ca_file))
    context.check_hostname = False
    reader, writer = await asyncio.open_connection("127.0.0.1", b.port, ssl=context)
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate required"):
        await reader.read()
    writer.transport.abort()
    assert b.counters.bad_handshakes == 1


async def test_silence_instead_of_tls_is_cut(cluster: Cluster, files: Files) -> None:
    tls = LinkTls(files("b"))
    b = await cluster.node("b", Recorder(), peers={A: ("127.0.0.1", 1)}, tls=tls, handshake_s=0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", b.port)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    await until(lambda: b.counters.bad_handshakes == 1)


async def test_the_key_is_needed_over_tls_too(cluster: Cluster, files: Files) -> None:
    tls = LinkTls(files("a"))
    await cluster.node("b", Recorder(), peers={A: ("127.0.0.1", 1)}, tls=tls, key=b"x" * 32)
    a = await cluster.node(
        "a", Recorder(), peers={B: ("127.0.0.1", cluster.started[0].port)}, dial=(B,), tls=tls, key=KEY
    )
    await until(lambda: a.rows()[0].state == "refused")
    assert "cluster" in a.rows()[0].reason


def test_whoever_ends_tls_in_between_fails_at_the_key() -> None:
    """Both hold the key; each saw the certificate of the one in between instead of the other's."""
    dialer, acceptor = (
        Handshake(side=side, node=node, incarnation=new_incarnation(), cluster="c", key=KEY, expected=(A, B))
        for side, node in ((Side.DIALER, A), (Side.ACCEPTOR, B))
    )
    dialer.bind(b"certificate of a", b"certificate of m")
    acceptor.bind(b"certificate of b", b"certificate of m")
    (proof,) = dialer.receive(acceptor.hello)
    acceptor.receive(dialer.hello)
    with pytest.raises(Refused) as refused:
        acceptor.receive(proof)
    assert refused.value.refusal.code == RefusalCode.WRONG_KEY


def test_bytes_that_were_altered_on_the_way_end_it(files: Files) -> None:
    dialer, acceptor = LinkTls(files("a")).end(Side.DIALER), LinkTls(files("b")).end(Side.ACCEPTOR)
    connect(dialer, acceptor)
    assert acceptor.receive(dialer.send(b"hello")) == b"hello"
    record = bytearray(dialer.send(b"hello"))
    record[-1] ^= 1
    with pytest.raises(ssl.SSLError):
        acceptor.receive(record)


def connect(dialer: Tls, acceptor: Tls) -> None:
    data = b""
    while not (dialer.up and acceptor.up):
        for end in (dialer, acceptor):
            end.receive(data)
            data = end.outgoing()


# ---- files ----


def test_files_that_are_no_good_are_named_with_the_reason(files: Files, tmp_path: Path) -> None:
    good, expired, other = files("good"), files("expired", days="-1"), files("wrong", "other")
    replace = msgspec.structs.replace
    missing, empty = tmp_path / "missing.pem", tmp_path / "empty.pem"
    empty.touch(mode=0o600)
    os.mkfifo(fifo := tmp_path / "pipe.pem", mode=0o600)  # who opens it waits for a writer
    cases: list[tuple[ClusterTls, Path, str]] = [
        (expired, expired.certificate_file, "expired"),
        (replace(good, ca_file=other.ca_file), other.ca_file, "not signed by"),
        (replace(good, key_file=other.key_file), other.key_file, "is not the key of"),
        *((replace(good, **{name: missing}), missing, "No such file") for name in good.__struct_fields__),
        *((replace(good, **{name: tmp_path}), tmp_path, "not a regular file") for name in good.__struct_fields__),
        *((replace(good, **{name: fifo}), fifo, "not a regular file") for name in good.__struct_fields__),
        (replace(good, certificate_file=empty), empty, "PEM"),
        (replace(good, key_file=empty), empty, "PEM"),
        (replace(good, ca_file=empty), empty, "no certificate"),
        (replace(good, key_file=locked(good, tmp_path)), tmp_path / "locked.key", "passphrase"),
    ]
    for case, path, words in cases:
        with pytest.raises(CertificateInvalid, match=words) as error:
            LinkTls(case)
        assert str(path) in str(error.value)
        assert error.value.exit_code == 4
    LinkTls(good)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_use_is_refused(files: Files, mode: int) -> None:
    tls = files("open")
    tls.key_file.chmod(mode)
    with pytest.raises(CertificateInvalid, match=f"mode {mode:04o}.*chmod 600 {tls.key_file}"):
        LinkTls(tls)


def replace_with(own: ClusterTls, other: ClusterTls) -> None:
    """As renewing a certificate does: the paths stay."""
    for name in own.__struct_fields__:
        path = getattr(own, name)
        new = path.with_suffix(".new")
        shutil.copy(getattr(other, name), new)  # with its mode
        new.rename(path)


@pytest.fixture
def own(files: Files, tmp_path: Path) -> ClusterTls:
    """Files that a test may replace."""
    names = ClusterTls.__struct_fields__
    made = ClusterTls(**{name: tmp_path / name for name in names})
    replace_with(made, files("first"))
    return made


def test_certificates_that_are_replaced_are_those_of_the_next_links(files: Files, own: ClusterTls) -> None:
    here, there = LinkTls(own), LinkTls(files("peer"))
    before = here.end(Side.DIALER)
    replace_with(own, files("second"))
    after = here.end(Side.DIALER)
    assert before.certificate != after.certificate
    for dialer in (before, after):
        acceptor = there.end(Side.ACCEPTOR)
        connect(dialer, acceptor)
        assert acceptor.peer_certificate == dialer.certificate
    replace_with(own, files("third", "another"))
    acceptor, dialer = here.end(Side.ACCEPTOR), LinkTls(files("new peer", "another")).end(Side.DIALER)
    connect(dialer, acceptor)  # with the authority, too
    assert dialer.peer_certificate == acceptor.certificate


@pytest.mark.parametrize("name", ClusterTls.__struct_fields__)
def test_certificates_that_are_broken_are_not_used(files: Files, own: ClusterTls, name: str) -> None:
    tls = LinkTls(own)
    first = tls.end(Side.DIALER).certificate
    path = getattr(own, name)
    path.write_text("nothing")
    with structlog.testing.capture_logs() as logs:
        assert [tls.end(Side.DIALER).certificate for _ in range(3)] == [first] * 3
    [entry] = logs
    assert entry["log_level"] == "error"
    assert str(path) in entry["error"]
    path.unlink()
    assert tls.end(Side.DIALER).certificate == first
    replace_with(own, files("second"))
    assert tls.end(Side.DIALER).certificate != first


def test_a_key_that_was_open_to_others_is_used_once_it_is_not(files: Files, own: ClusterTls) -> None:
    tls = LinkTls(own)
    first = tls.end(Side.DIALER).certificate
    second = files("second")
    second.key_file.chmod(0o644)
    replace_with(own, second)
    assert tls.end(Side.DIALER).certificate == first
    own.key_file.chmod(0o600)
    assert tls.end(Side.DIALER).certificate != first


def locked(files: ClusterTls, directory: Path) -> Path:
    """The key behind a passphrase: nobody is there to type one."""
    path = directory / "locked.key"
    command = ["openssl", "ec", "-in", files.key_file, "-aes128", "-passout", "pass:word", "-out", path]
    subprocess.run(command, check=True, capture_output=True)
    path.chmod(0o600)
    return path
