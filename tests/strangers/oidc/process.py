"""oidc-provider as a process: started with keys of its own, killed, started again on its port."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.strangers.javascript_stranger import install, put_beside

SOURCES: Final = Path(__file__).parent / "provider"


def install_provider(cache: Path) -> Path:
    """The directory where it is installed; StrangerMissing without node.js or npm."""
    return install(cache, SOURCES, "oidc-provider")


def new_keys(name: str) -> dict[str, Any]:
    """Private signing keys: an elliptic one and an RSA one, which clients choose between."""
    elliptic = jwt.get_algorithm_by_name("ES256").to_jwk(ec.generate_private_key(ec.SECP256R1()))
    modular = jwt.get_algorithm_by_name("PS256").to_jwk(rsa.generate_private_key(65_537, 2048))
    keys = [
        {**json.loads(elliptic), "kid": f"{name}-elliptic", "use": "sig", "alg": "ES256"},
        {**json.loads(modular), "kid": f"{name}-rsa", "use": "sig", "alg": "PS256"},
    ]
    for key in keys:
        key.pop("key_ops", None)
    return {"keys": keys}


class OpenIdStranger:
    """A running provider. Its memory is lost when it is killed: codes, sessions and grants."""

    def __init__(self, installation: Path) -> None:
        self._script = put_beside(installation, SOURCES / "provider.mjs")
        self.issuer = ""
        self.start("first")

    def start(self, keys: str) -> None:
        """Start it, on the port that it had before if it had one, with new keys of this name."""
        port = self.issuer.rpartition(":")[2] or "0"
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(new_keys(keys), file)
            file.flush()
            # Its standard input is its life line: it ends when ours closes, however we end.
            self._process = subprocess.Popen(
                ["node", str(self._script), port, file.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert self._process.stdout is not None
            first_line = self._process.stdout.readline()
        if not first_line:
            self.stop()
            raise RuntimeError("oidc-provider ended before it listened; its error is above")
        self.issuer = str(json.loads(first_line)["issuer"])

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()
