"""What settings name as files of TLS is read and checked before anything is served, and refused in one line."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from quire_engine.config import EngineConfig
from quire_proto.cli import read_settings
from quire_proto.tls import (
    CertKeyFiles,
    ClientTls,
    Identity,
    ServerTls,
    TlsError,
    read_ca,
    read_cert_key,
    read_key,
)
from quire_router.config import Settings

from tests.support.certificates import ENGINE_NAME, Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def issued(authority: Authority) -> CertKeyFiles:
    return authority.issue(ENGINE_NAME)


def damaged(file: Path) -> Path:
    """A copy that begins and ends as it should."""
    lines = file.read_text().splitlines()
    copy = file.with_name(f"damaged-{file.name}")
    copy.write_text("\n".join([*lines[:3], lines[-1]]))
    return copy


def test_a_valid_file_is_read_unchanged(authority: Authority, issued: CertKeyFiles) -> None:
    assert read_ca(authority.ca) == authority.ca.read_bytes()
    assert read_cert_key(issued) == Identity(issued.certificate.read_bytes(), issued.key.read_bytes())


def test_a_file_may_hold_several_authorities_with_text_between_them(authority: Authority, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes("# ältere\n".encode() + authority.ca.read_bytes() + Authority(tmp_path, "new").ca.read_bytes())
    assert read_ca(both) == both.read_bytes()


@pytest.mark.parametrize(
    ("contents", "words"),
    [(b"", "has no certificate"), (b"\xff\x00", "has no certificate"), (b"-----BEGIN CERTIFICATE-----", "is damaged")],
)
def test_a_file_without_certificates_is_refused_as_an_authority(tmp_path: Path, contents: bytes, words: str) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(contents)
    with pytest.raises(TlsError, match=words) as refusal:
        read_ca(file)
    assert str(file) in str(refusal.value)


def test_a_damaged_file_is_refused(authority: Authority, issued: CertKeyFiles) -> None:
    with pytest.raises(TlsError, match="is damaged"):
        read_ca(damaged(authority.ca))
    for files in (
        CertKeyFiles(damaged(issued.certificate), issued.key),
        CertKeyFiles(issued.certificate, damaged(issued.key)),
    ):
        with pytest.raises(TlsError, match="is damaged"):
            read_cert_key(files)


def test_a_key_of_another_certificate_is_refused(authority: Authority, issued: CertKeyFiles) -> None:
    other = authority.issue("other.test")
    with pytest.raises(TlsError, match=r"other\.test\.key is not the key of .*engine\.test\.crt"):
        read_cert_key(CertKeyFiles(issued.certificate, other.key))


@pytest.mark.parametrize("form", [PrivateFormat.TraditionalOpenSSL, PrivateFormat.PKCS8])
def test_a_key_with_a_password_is_refused_without_a_prompt(
    issued: CertKeyFiles, tmp_path: Path, form: PrivateFormat
) -> None:
    key = load_pem_private_key(issued.key.read_bytes(), None)
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(key.private_bytes(Encoding.PEM, form, BestAvailableEncryption(b"secret")))
    with pytest.raises(TlsError, match="is encrypted"):
        read_key(encrypted)


def test_a_certificate_and_key_replaced_between_two_reads_are_not_mixed(
    authority: Authority, issued: CertKeyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Path.read_bytes

    def replaced_after(file: Path) -> bytes:
        contents = plain(file)
        if file == issued.key:  # the last of the first look
            monkeypatch.setattr(Path, "read_bytes", plain)
            authority.issue(ENGINE_NAME)
        return contents

    monkeypatch.setattr(Path, "read_bytes", replaced_after)
    with pytest.raises(TlsError, match="are just being replaced"):
        read_cert_key(issued)
    assert read_cert_key(issued).key == issued.key.read_bytes()


# Settings

Reader = Callable[[list[str]], object]
ENGINE: Reader = partial(read_settings, EngineConfig)
ROUTER: Reader = partial(read_settings, Settings)


def refused(read: Reader, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as end:
        read(["--model", "/m", *arguments])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_settings_name_the_files(authority: Authority, issued: CertKeyFiles) -> None:
    cert, key, ca = str(issued.certificate), str(issued.key), str(authority.ca)
    engine = read_settings(EngineConfig, ["--model", "/m", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca])
    flags = ["--engine-tls-ca", ca, "--engine-tls-cert", cert, "--engine-tls-key", key, "--engine-tls-name", "e.test"]
    assert engine.tls == ServerTls(issued, authority.ca)
    assert read_settings(Settings, ["--model", "/m", *flags]).engine_tls == ClientTls(authority.ca, issued, "e.test")
    assert read_settings(Settings, ["--model", "/m", *flags[:2]]).engine_tls == ClientTls(authority.ca)


def test_without_settings_nothing_is_encrypted() -> None:
    assert read_settings(EngineConfig, ["--model", "/m"]).tls is None
    assert read_settings(Settings, ["--model", "/m"]).engine_tls is None


@pytest.mark.parametrize(
    ("read", "flags", "line"),
    [
        (ENGINE, ["--tls-cert", "CERT"], "error: --tls-cert needs --tls-key."),
        (ENGINE, ["--tls-key", "KEY"], "error: --tls-key needs --tls-cert."),
        (ENGINE, ["--tls-client-ca", "CA"], "error: --tls-client-ca needs --tls-cert."),
        (ROUTER, ["--engine-tls-ca", "CA", "--engine-tls-cert", "CERT"], "--engine-tls-cert needs --engine-tls-key."),
        (ROUTER, ["--engine-tls-ca", "CA", "--engine-tls-key", "KEY"], "--engine-tls-key needs --engine-tls-cert."),
        (ROUTER, ["--engine-tls-cert", "CERT", "--engine-tls-key", "KEY"], "TLS to engines needs --engine-tls-ca"),
        (ROUTER, ["--engine-tls-name", "e.test"], "TLS to engines needs --engine-tls-ca"),
        (ROUTER, ["--engine-tls-ca", "CA", "--engine-tls-name", "e/x"], "--engine-tls-name: 'e/x' is not a host name"),
        (ENGINE, ["--tls-cert", "CERT", "--tls-key", "NONE"], "NONE cannot be read: No such file or directory"),
        (ENGINE, ["--tls-cert", "KEY", "--tls-key", "KEY"], "--tls-cert: KEY has no certificate in PEM format"),
        (ENGINE, ["--tls-cert", "CERT", "--tls-key", "CA"], "--tls-key: CA has no private key in PEM format"),
        (ENGINE, ["--tls-cert", "CERT", "--tls-key", "OTHER"], "--tls-key: OTHER is not the key of CERT."),
        (ROUTER, ["--engine-tls-ca", "NONE"], "--engine-tls-ca: NONE cannot be read: No such file or directory"),
        (ROUTER, ["--engine-tls-ca", "KEY"], "--engine-tls-ca: KEY has no certificate in PEM format"),
        (
            ROUTER,
            ["--engine-tls-ca", "CA", "--engine-tls-cert", "CERT", "--engine-tls-key", "OTHER"],
            "--engine-tls-key: OTHER is not the key of CERT.",
        ),
    ],
)
def test_an_unusable_file_is_a_one_line_error(
    authority: Authority,
    issued: CertKeyFiles,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    read: Reader,
    flags: list[str],
    line: str,
) -> None:
    files = {"CERT": issued.certificate, "KEY": issued.key, "CA": authority.ca, "NONE": tmp_path / "none"}
    files["OTHER"] = authority.issue("other.test").key
    said = refused(read, [str(files.get(flag, flag)) for flag in flags], capsys)
    for word, file in files.items():
        said = said.replace(str(file), word)
    assert line in said
