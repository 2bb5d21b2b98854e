"""An authority for tests: issues certificates, and puts them where services look for them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import certifi
import trustme
from quire_proto.tls import CertKeyFiles

ENGINE_NAME, ROUTER_NAME = "quire-engine.test", "quire-router.test"


def one_authority(folder: Path) -> Path:
    """A file with one of the authorities that everybody trusts, for ``SSL_CERT_FILE``: no test speaks with anybody whom
    they have certified, and each client would read all of them, which takes longer than most answers.
    """
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----")
    file = folder / "authorities.pem"
    file.write_text(f"{first}{end}\n")
    return file


class Authority:
    """Vouches for whom it likes. ``ca`` is its own certificate's file."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._ca = trustme.CA(organization_name=name)
        self._folder = folder
        self.ca = folder / f"{name}.pem"
        self.write_ca(self.ca)

    def write_ca(self, file: Path) -> None:
        """Puts its own certificate into ``file``, in place of whatever is there."""
        self._ca.cert_pem.write_to_path(str(file))

    def issue(self, name: str, *, files: str = "", expired: bool = False) -> CertKeyFiles:
        """A certificate for ``name``, in the files of an earlier one where ``files`` is what that was called."""
        now = datetime.now(UTC)
        until = now - timedelta(hours=1) if expired else now + timedelta(days=1)
        leaf = self._ca.issue_cert(name, not_before=now - timedelta(days=2), not_after=until)
        certificate, key = (self._folder / f"{files or name}.{ending}" for ending in ("crt", "key"))
        certificate.write_bytes(b"".join(each.bytes() for each in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(str(key))
        return CertKeyFiles(certificate, key)
