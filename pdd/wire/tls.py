"""Certificates of a node, and TLS over bytes: what stands between a TCP connection and the frames of a link.

Contexts are made at the start, and again when their files have changed (renewed.py), and tried on themselves: whatever
is wrong with the files is found before anything listens. `Tls` does no I/O. A link over TLS still has its handshake
with the cluster key (handshake.py), which binds the certificates of both ends: TLS keeps others from reading, the key
decides who belongs.
"""

from __future__ import annotations

import os
import ssl
import stat
from functools import partial
from pathlib import Path

from pdd.base.errors import CertificateInvalid
from pdd.topology.model import Certificate, ClusterTls
from pdd.wire.handshake import Side
from pdd.wire.renewed import Renewed

_READ_BYTES = 64 * 1024
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})


class LinkTls:
    """What control links need: mutual TLS 1.3 against one authority. Raises CertificateInvalid."""

    def __init__(self, files: ClusterTls) -> None:
        self._ca_file = files.ca_file
        paths = (files.certificate_file, files.key_file, files.ca_file)
        self._contexts = Renewed(paths, partial(_link_contexts, files))

    def end(self, side: Side) -> Tls:
        """For one connection."""
        server, client, certificate = self._contexts.current()
        accepts = side is Side.ACCEPTOR
        context = server if accepts else client
        return Tls(context, server_side=accepts, certificate=certificate, authority=str(self._ca_file))


class HttpsTls:
    """What an HTTP server needs: TLS 1.2 or later, any client. Raises CertificateInvalid."""

    def __init__(self, files: Certificate) -> None:
        self._context = Renewed((files.certificate_file, files.key_file), partial(_https_context, files))

    def context(self) -> ssl.SSLContext:
        """For the next connection."""
        return self._context.current()


def pinned_context(certificate_file: Path) -> ssl.SSLContext:
    """For a client that has the server's own certificate: no other one will do. Raises CertificateInvalid."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _load_authority(context, certificate_file)
    return context


class Tls:
    """One end of one connection. Bytes from the network go into `receive`, what it returns is the peer's; bytes for the
    network come out of `send` and, after each `receive`, `outgoing`. It fails with ssl.SSLError, and is then over.
    `certificate`: this end's own, DER. `authority`: of the peer's, for messages."""

    def __init__(
        self, context: ssl.SSLContext, *, server_side: bool, certificate: bytes = b"", authority: str = ""
    ) -> None:
        self.certificate = certificate
        self.authority = authority
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self.up = False
        """The TLS handshake is done on this side; `send` may be used."""

    @property
    def peer_certificate(self) -> bytes:
        """DER, once `up`."""
        return self._tls.getpeercert(binary_form=True) or b""

    def receive(self, data: bytes) -> bytes:
        """What of the peer's bytes can be read with these. The first call of a dialer takes none."""
        self._incoming.write(data)
        plain = bytearray()
        try:
            if not self.up:
                self._tls.do_handshake()
                self.up = True
            while chunk := self._tls.read(_READ_BYTES):
                plain += chunk
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass  # more to come; or the peer said that nothing will: the connection ends next
        return bytes(plain)

    def send(self, data: bytes) -> bytes:
        self._tls.write(data)
        return self._outgoing.read()

    def outgoing(self) -> bytes:
        """Handshake bytes and, after a failure, the alert that tells the peer why."""
        return self._outgoing.read()


def speaks_no_tls(error: ssl.SSLError) -> bool:
    """The peer's first bytes were none of TLS."""
    return error.reason in _NO_TLS


def explained(error: ssl.SSLError, authority: str = "") -> str:
    """Why TLS failed, for the operator of this side."""
    reason = error.reason or "the connection broke off"
    if isinstance(error, ssl.SSLCertVerificationError):
        signed = f"; it must be signed by {authority}" if authority else ""
        return f"TLS: the peer's certificate is not accepted: {error.verify_message}{signed}"
    if speaks_no_tls(error):
        return "TLS: the other end does not speak it: give both nodes `cluster.tls`, or neither"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "TLS: the peer shows no certificate"
    said = reason.lower().replace("_", " ")
    if "ALERT" in reason:
        return f"TLS: the peer does not accept this node's certificate or version ({said}); its own log says more"
    return f"TLS: {said}"


def _link_contexts(files: ClusterTls) -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
    """Of an acceptor, of a dialer, and this node's certificate, DER."""
    server, client = _context(ssl.PROTOCOL_TLS_SERVER, files), _context(ssl.PROTOCOL_TLS_CLIENT, files)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the cluster key proves who it is
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authority(context, files.ca_file)
    server.num_tickets = 0  # links are few and long
    return server, client, _try(server, client, files, f"it is not signed by {files.ca_file}")


def _https_context(files: Certificate) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER, files)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _try(context, pinned_context(files.certificate_file), files, "its authority is unknown")
    return context


def _context(protocol: int, files: Certificate) -> ssl.SSLContext:
    _check_readable(files.certificate_file, "certificate")
    _check_readable(files.key_file, "key")
    mode = stat.S_IMODE(files.key_file.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise CertificateInvalid(
            f"TLS key {files.key_file} has mode {mode:04o}: others can use it; run `chmod 600 {files.key_file}`"
        )
    context = ssl.SSLContext(protocol)
    try:
        context.load_cert_chain(files.certificate_file, files.key_file, password=b"")
    except ssl.SSLError as error:
        raise CertificateInvalid(_load_fault(files, error)) from error
    return context


def _load_fault(files: Certificate, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"TLS key {files.key_file} is not the key of certificate {files.certificate_file}"
    return (
        f"TLS certificate {files.certificate_file} or its key {files.key_file} cannot be read as PEM "
        f"(a key must have no passphrase): {error.reason or error}"
    )


def _load_authority(context: ssl.SSLContext, path: Path) -> None:
    _check_readable(path, "authority")
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise CertificateInvalid(
            f"TLS authority {path} holds no certificate in PEM: {error.reason or error}"
        ) from error


def _check_readable(path: Path, what: str) -> None:
    try:
        # O_NONBLOCK: a named pipe in its place must not hang the daemon.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CertificateInvalid(f"TLS {what} {path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CertificateInvalid(f"TLS {what} {path} is not a regular file")
    finally:
        os.close(fd)


def _try(server: ssl.SSLContext, client: ssl.SSLContext, files: Certificate, otherwise: str) -> bytes:
    """The node connects to itself in memory: what its peers would refuse, it refuses. Returns its certificate, DER."""
    ends = (Tls(client, server_side=False), Tls(server, server_side=True))
    data = b""
    try:
        for end in ends * 2:  # two round trips, the first from nothing
            end.receive(data)
            data = end.outgoing()
    except ssl.SSLCertVerificationError as error:
        signed = f" ({otherwise})" if error.verify_code in _UNKNOWN_AUTHORITY else ""
        raise CertificateInvalid(f"TLS certificate {files.certificate_file}: {error.verify_message}{signed}") from error
    except ssl.SSLError as error:
        raise CertificateInvalid(f"TLS certificate {files.certificate_file} is no good: {error.reason}") from error
    return ends[0].peer_certificate


_UNKNOWN_AUTHORITY = frozenset({18, 19, 20, 21})
"""X509_V_ERR_*: self-signed, or an issuer that is not in the authority file (openssl/x509_vfy.h)."""
