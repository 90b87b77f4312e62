"""Certificates as an operator makes them, by the script that the documentation names, and some that nobody should make."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from baton.peer_trust import Part, PeerTrust

SCRIPT = Path(__file__).parents[1] / "deploy" / "make_certificates.sh"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


class Authority:
    """A cluster's authority, and a folder per part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, folder: Path) -> Authority:
        made = cls(folder)
        made.renew()
        return made

    def copy(self, folder: Path) -> Authority:
        return Authority(shutil.copytree(self.folder, folder))

    def renew(self) -> None:
        """Make certificates of the parts, under the authority that there is."""
        subprocess.run(["sh", SCRIPT, self.folder], check=True, capture_output=True)

    def of(self, part: Part) -> Path:
        return self.folder / part

    def trust(self, part: Part) -> PeerTrust:
        return PeerTrust(str(self.of(part)), part)

    def sign_expired(self, part: Part) -> None:
        """Put a certificate that ended yesterday in the place of the part's own."""
        (self.folder / "names").write_text(f"subjectAltName=DNS:{part.host_name}\n")
        self._openssl(f"req -new -key {part}/tls.key -subj /CN=late -out request")
        self._openssl(
            f"x509 -req -in request -days -1 -extfile names -CA ca.crt -CAkey ca.key -CAcreateserial -out {part}/tls.crt"
        )

    def encrypt_key(self, part: Part) -> None:
        self._openssl(f"ec -aes128 -passout pass:secret -in {part}/tls.key -out {part}/tls.key")

    def _openssl(self, arguments: str) -> None:
        subprocess.run(["openssl", *arguments.split()], cwd=self.folder, check=True, capture_output=True)
