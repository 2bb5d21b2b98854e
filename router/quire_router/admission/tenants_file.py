"""The tenants file: TOML or JSON, with the tenants' limits, and their keys as they are, by their hashes or in files of
their own; or the claims of those who have tokens instead. It is read again when it was replaced (``settings_file``).
A file that lets nobody in is an error, unless it says that it is open to all.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from quire_proto.units import Seconds

from quire_router.admission.settings_file import (
    FileVersions,
    SettingsFileError,
    read_content,
    read_text,
    versions_of,
)
from quire_router.admission.tenants import Tenant, Tenants, check_key
from quire_router.core.tenant_ids import is_derived

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_POLICY = {"models", "weight", "priority", "allow_priority", "allow_fleet", "requests_per_minute", "tokens_per_minute"}
_POLICY |= {"allow_lora_updates", "max_concurrent", "max_queued", "retention"}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, by its SHA-256: 32 ``digest`` bytes, by which nobody finds a key that is long and random. It is accepted
    until ``expires``, in seconds since 1970; None for always. ``secret`` is what the tenant's salt is made from: the
    key, or its hash where only that is known.
    """

    digest: bytes
    secret: str = field(repr=False)
    expires: float | None = None

    @classmethod
    def of(cls, key: str, expires: float | None = None) -> "ApiKey":
        """Returns a key that is known itself."""
        return cls(sha256(key.encode()).digest(), key, expires)


@dataclass(frozen=True, slots=True)
class TenantsFile:
    """The content of the file: the tenants, the ``keys`` of each by its id (its salt is made from the first one), and
    by each of the ``claims`` that tokens may have the id of its tenant. ``versions`` are those of the files that it was
    read from. An ``open`` file lets everybody in, with the limits of its default.
    """

    tenants: Tenants = field(default_factory=Tenants)
    keys: dict[str, tuple[ApiKey, ...]] = field(default_factory=dict, repr=False)
    claims: dict[str, str] = field(default_factory=dict)
    policies: tuple[Tenant, ...] = ()
    versions: FileVersions = field(default_factory=dict)
    open: bool = False

    @property
    def summary(self) -> str:
        """What it says, in a few words."""
        return f"it names {len(self.policies)} tenants"

    def unknown_models(self, served: Collection[str]) -> list[tuple[str, str]]:
        """Returns the models that tenants may use and that are not ``served``: each with the tenant's name, empty for
        tenants without an entry.
        """
        policies = (self.tenants[""], *self.policies)
        return [(each.id, model) for each in policies for model in sorted(each.models) if model not in served]


def _check_models(models: list[str]) -> list[str]:
    if not models:
        raise ValueError("it is empty, which could mean none or all: leave it out for all models")
    return models


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("must be 1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends")
    if is_derived(name):
        raise ValueError("must not look like the names that keys and tokens without a tenant get, as 0123456789ab")
    return name


Count = Annotated[int, Field(ge=1, le=2**40)]


class _Policy(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    models: Annotated[list[str], AfterValidator(_check_models)] = []
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    priority: Annotated[int, Field(ge=-(2**20), le=2**20)] = 0
    allow_priority: bool = False
    allow_fleet: bool = False
    allow_lora_updates: bool = False
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None
    max_queued: Count | None = None
    retention: Annotated[Seconds, Field(ge=0, le=31_536_000)] | None = None

    def tenant(self, tenant_id: str) -> Tenant:
        fields = self.model_dump(include=_POLICY) | {"models": frozenset(self.models)}
        return Tenant(tenant_id, listed=bool(tenant_id), **fields)


class _Key(BaseModel):
    """A key that ends, or of which only the hash is here. ``expires`` is a date with a zone."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    key: Annotated[str, AfterValidator(check_key)] | None = None
    sha256: Annotated[str, Field(pattern="^[0-9A-Fa-f]{64}$")] | None = None
    file: str | None = None
    expires: AwareDatetime | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "_Key":
        if sum(each is not None for each in (self.key, self.sha256, self.file)) != 1:
            raise ValueError("needs one of key, sha256 and file")
        return self


def _as_table(value: object) -> object:
    return {"key": check_key(value)} if isinstance(value, str) else value


class _Entry(_Policy):
    name: Annotated[str, AfterValidator(_check_name)]
    keys: list[Annotated[_Key, BeforeValidator(_as_table)]] = []
    key_files: list[str] = []
    claims: list[Annotated[str, Field(min_length=1, max_length=256)]] = []

    @model_validator(mode="after")
    def _has_a_key(self) -> "_Entry":
        if not self.keys and not self.key_files and not self.claims:
            raise ValueError("needs a key, in keys or key_files, or claims of tokens")
        return self


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    open: bool = False
    default: _Policy = _Policy()
    tenants: list[_Entry] | None = None


def read_tenants(
    path: Path, *, has_keys: bool = False, has_issuer: bool | None = None, must_close: bool = False
) -> TenantsFile:
    """Returns the tenants in ``path``, which is JSON if its name ends in ``.json`` and else TOML. Names of key files
    are relative to its folder. ``has_keys`` and ``has_issuer`` say whether callers can also have one of ``--api-key``,
    or a token; None: that is not known. One that ``must_close`` is not open. Raises ``SettingsFileError`` when the file
    or one of its key files cannot be used, and when it lets nobody in, or everybody beside keys.
    """
    versions = versions_of([path])
    content = read_content(path, _File)
    entries = content.tenants or []
    _check_access(path, content, has_keys=has_keys, has_issuer=has_issuer)
    if content.open and must_close:
        raise SettingsFileError(f"{path}: open: everybody would be let in, in spite of --require-key: leave out one.")
    files = [each.file for entry in entries for each in entry.keys if each.file is not None]
    files += [name for entry in entries for name in entry.key_files]
    versions |= versions_of(path.parent / name for name in files)
    policies = tuple(entry.tenant(entry.name) for entry in entries)
    keys: dict[str, tuple[ApiKey, ...]] = {}
    claims: dict[str, str] = {}
    for number, entry in enumerate(entries):
        where = f"{path}: tenants[{number}]"
        if entry.name in keys:
            raise SettingsFileError(f"{where}.name: {entry.name} is there twice.")
        keys[entry.name] = tuple(_read_keys(path, where, entry))
        for claim in entry.claims:
            if claims.setdefault(claim, entry.name) != entry.name:
                raise SettingsFileError(f"{where}.claims: {claim} is also one of {claims[claim]}.")
    _check_distinct(path, keys)
    tenants = Tenants(policies, content.default.tenant(""))
    return TenantsFile(tenants, keys, claims, policies, versions, content.open)


def _check_access(path: Path, content: _File, *, has_keys: bool, has_issuer: bool | None) -> None:
    entries = content.tenants or []
    if content.tenants is None and not content.open:
        raise SettingsFileError(f"{path}: tenants: it is missing: name one, or say open = true to let everybody in.")
    if content.open and (entries or has_keys or has_issuer):
        raise SettingsFileError(
            f"{path}: open: everybody would be let in without the keys or tokens that there are: leave out open, or "
            "the tenants, --api-key and --oidc-issuer-url."
        )
    if not (entries or content.open or has_keys or has_issuer):
        raise SettingsFileError(
            f"{path}: tenants: it is empty, which lets no client in: name one, or say open = true to let everybody in."
        )
    for number, entry in enumerate(entries):
        if entry.claims and has_issuer is False:
            raise SettingsFileError(
                f"{path}: tenants[{number}].claims: no tokens are accepted: give --oidc-issuer-url, or keys instead."
            )


def _read_keys(path: Path, where: str, entry: _Entry) -> Iterable[ApiKey]:
    for position, each in enumerate(entry.keys):
        expires = None if each.expires is None else each.expires.timestamp()
        if each.sha256 is not None:
            digest = each.sha256.lower()
            yield ApiKey(bytes.fromhex(digest), f"sha256:{digest}", expires)
        elif each.file is not None:
            yield ApiKey.of(_read_key(path.parent / each.file, f"{where}.keys[{position}].file"), expires)
        else:
            yield ApiKey.of(each.key or "", expires)
    for position, name in enumerate(entry.key_files):
        yield ApiKey.of(_read_key(path.parent / name, f"{where}.key_files[{position}]"))


def _read_key(path: Path, where: str) -> str:
    """Reads the one key in a file; white space around it is ignored."""
    try:
        return check_key(read_text(path, where).strip())
    except SettingsFileError:
        raise
    except ValueError as error:
        raise SettingsFileError(f"{where}: {error}.") from None


def _check_distinct(path: Path, keys: dict[str, tuple[ApiKey, ...]]) -> None:
    owners: dict[bytes, str] = {}
    for name, own in keys.items():
        for key in own:
            if key.digest in owners:
                raise SettingsFileError(f"{path}: a key of {name} is there twice, also as one of {owners[key.digest]}.")
            owners[key.digest] = name
