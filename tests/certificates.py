"""Authorities and certificates for tests, made by the openssl command line (EC P-256: quick to make)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pdd.topology.model import ClusterTls


def make_authority(directory: Path, name: str = "ca") -> Path:
    """Self-signed; its key stands beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    return _make(directory, name, "-x509", "-days", "2")


def make_certificate(directory: Path, name: str, authority: Path, *, days: str = "2") -> ClusterTls:
    """Signed by `authority`; negative days: expired."""
    request = directory / f"{name}.csr"
    key = directory / f"{name}.key"
    _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key, "-out", request,
             "-subj", f"/CN={name}")  # fmt: skip
    key.chmod(0o600)
    file = directory / f"{name}.crt"
    _openssl("x509", "-req", "-in", request, "-CA", authority, "-CAkey", authority.with_suffix(".key"),
             "-CAcreateserial", "-days", days, "-out", file)  # fmt: skip
    return ClusterTls(certificate_file=file, key_file=key, ca_file=authority)


def make_self_signed(directory: Path, name: str) -> Path:
    """For HTTP: a certificate that is its own authority; its key stands beside it."""
    return _make(directory, name, "-x509", "-days", "2")


def _make(directory: Path, name: str, *options: str) -> Path:
    file = directory / f"{name}.crt"
    key = file.with_suffix(".key")
    _openssl("req", *options, "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
             "-keyout", key, "-out", file, "-subj", f"/CN={name}")  # fmt: skip
    key.chmod(0o600)
    return file


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
