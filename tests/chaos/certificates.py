"""Certificates of a stack, and how they change: as files of a mounted Secret, all of them at one moment."""

import os
import shutil
from itertools import count
from pathlib import Path

from tests.support.certificates import ENGINE_NAME, ROUTER_NAME, Authority

_CA = "ca.pem"
_NAMES = (ENGINE_NAME, ROUTER_NAME)


class Certificates:
    """In ``folder``, which looks as the kubelet makes it: each file is a link through one that changes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._numbers = count()
        self._authority = self._new_authority()
        self._bring(self._authority.ca.read_bytes())
        for file in (folder / "..data").iterdir():
            (folder / file.name).symlink_to(Path("..data") / file.name)

    @property
    def engine_flags(self) -> tuple[str, ...]:
        """An engine's flags for them."""
        certificate, key = self._files(ENGINE_NAME)
        return "--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", str(self._folder / _CA)

    @property
    def router_flags(self) -> tuple[str, ...]:
        """A router's flags for them."""
        certificate, key = self._files(ROUTER_NAME)
        shown = ("--engine-tls-cert", certificate, "--engine-tls-key", key)
        return "--engine-tls-ca", str(self._folder / _CA), "--engine-tls-name", ENGINE_NAME, *shown

    def trust_next(self) -> None:
        """First of three steps to another authority: certificates of both are believed."""
        former, self._authority = self._authority, self._new_authority()
        self._bring(former.ca.read_bytes() + self._authority.ca.read_bytes(), former)

    def issue(self) -> None:
        """The second: new certificates, of the new one."""
        self._bring((self._folder / _CA).read_bytes())

    def distrust_former(self) -> None:
        """The last: only the new one is believed."""
        self._bring(self._authority.ca.read_bytes())

    def _files(self, name: str) -> tuple[str, str]:
        return str(self._folder / f"{name}.crt"), str(self._folder / f"{name}.key")

    def _new_authority(self) -> Authority:
        folder = self._folder / f"..authority-{next(self._numbers)}"
        folder.mkdir()
        return Authority(folder)

    def _bring(self, trusted: bytes, issuer: Authority | None = None) -> None:
        made = self._folder / f"..{next(self._numbers)}"
        made.mkdir()
        (made / _CA).write_bytes(trusted)
        for name in _NAMES:
            files = (issuer or self._authority).issue(name)
            shutil.copy(files.certificate, made)
            shutil.copy(files.key, made)
        link = self._folder / "..next"
        link.symlink_to(made.name)
        os.replace(link, self._folder / "..data")
