"""A daemon whose certificates are no good ends before it starts anything, with exit code 4 and the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from certificates import make_authority, make_certificate

from pdd.__main__ import main

TOY = Path(__file__).parents[3] / "topology" / "toy-model"


def topology(directory: Path, tls: dict[str, str]) -> Path:
    (directory / "cluster.key").touch(mode=0o600)
    (directory / "cluster.key").write_text("k" * 64)
    replica = {"role": "colocated", "threads": 1}
    file = directory / "topology.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "version": 1,
                "cluster": {"key_file": "cluster.key", "tls": tls, "run_dir": str(directory / "run")},
                "model": {"name": "toy", "path": str(TOY)},
                "nodes": {"node0": {"control_port": 7411, "http": {"port": 8000}, "replicas": [replica]}},
            }
        )
    )
    return file


@pytest.mark.parametrize(
    ("days", "mode", "ca", "words"),
    [
        ("-1", 0o600, "ca.crt", "node.crt: certificate has expired"),
        ("2", 0o644, "ca.crt", "node.key has mode 0644"),
        ("2", 0o600, "other.crt", "not signed by"),
        ("2", 0o600, "none.crt", "none.crt: No such file"),
    ],
)
def test_exit_code_and_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], days: str, mode: int, ca: str, words: str
) -> None:
    make_authority(tmp_path, "other")
    made = make_certificate(tmp_path, "node", make_authority(tmp_path), days=days)
    made.key_file.chmod(mode)
    file = topology(tmp_path, {"certificate_file": "node.crt", "key_file": "node.key", "ca_file": ca})
    assert main(["daemon", "--topology", str(file), "--node", "node0"]) == 4
    assert words in capsys.readouterr().err
