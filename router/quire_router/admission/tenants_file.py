"""The tenants file: TOML or JSON, with the tenants' limits and their keys, or the files in which keys are mounted."""

import json
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from quire_router.admission.tenants import Tenant, Tenants, check_key

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_KEY_ID = re.compile(r"[0-9a-f]{12}")
_MAX_BYTES = 4 * 2**20
_POLICY = {"models", "weight", "priority", "allow_priority", "allow_fleet", "requests_per_minute", "tokens_per_minute"}
_POLICY |= {"allow_lora_updates", "max_concurrent", "max_queued", "retention"}


class TenantsFileError(ValueError):
    """The file cannot be used. The message is one sentence with the path of the entry at fault, and never has a key."""


@dataclass(frozen=True, slots=True)
class TenantsFile:
    """The content of the file: the tenants, and the ``keys`` of each by its id; its salt is made from the first key."""

    tenants: Tenants = field(default_factory=Tenants)
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    policies: tuple[Tenant, ...] = ()

    def unknown_models(self, served: Collection[str]) -> list[tuple[str, str]]:
        """Returns the models that tenants may use and that are not ``served``: each with the tenant's name, empty for
        tenants without an entry.
        """
        policies = (self.tenants[""], *self.policies)
        return [(each.id, model) for each in policies for model in sorted(each.models) if model not in served]


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("must be 1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends")
    if _KEY_ID.fullmatch(name):
        raise ValueError("must not be twelve hexadecimal digits, as the names that keys without a tenant get")
    return name


Count = Annotated[int, Field(ge=1, le=2**40)]


class _Policy(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    models: list[str] = []
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    priority: Annotated[int, Field(ge=-(2**20), le=2**20)] = 0
    allow_priority: bool = False
    allow_fleet: bool = False
    allow_lora_updates: bool = False
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None
    max_queued: Count | None = None
    retention: Annotated[float, Field(ge=0, le=31_536_000)] | None = None

    def tenant(self, tenant_id: str) -> Tenant:
        fields = self.model_dump(include=_POLICY) | {"models": frozenset(self.models)}
        return Tenant(tenant_id, **fields)


class _Entry(_Policy):
    name: Annotated[str, AfterValidator(_check_name)]
    keys: list[Annotated[str, AfterValidator(check_key)]] = []
    key_files: list[str] = []

    @model_validator(mode="after")
    def _has_a_key(self) -> "_Entry":
        if not self.keys and not self.key_files:
            raise ValueError("needs a key, in keys or key_files")
        return self


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    default: _Policy = _Policy()
    tenants: list[_Entry]


def read_tenants(path: Path) -> TenantsFile:
    """Returns the tenants in ``path``, which is JSON if its name ends in ``.json`` and else TOML. Names of key files
    are relative to its folder. Raises ``TenantsFileError`` when the file or one of its key files cannot be used.
    """
    try:
        content = _File.model_validate(_parse(path))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise TenantsFileError(f"{path}: {_format_location(problem['loc'])}{_format_problem(problem)}.") from None
    policies = tuple(entry.tenant(entry.name) for entry in content.tenants)
    keys: dict[str, tuple[str, ...]] = {}
    for number, entry in enumerate(content.tenants):
        if entry.name in keys:
            raise TenantsFileError(f"{path}: tenants[{number}].name: {entry.name} is there twice.")
        keys[entry.name] = (*entry.keys, *_read_keys(path, number, entry))
    _check_distinct(path, keys)
    return TenantsFile(Tenants(policies, content.default.tenant("")), keys, policies)


def _parse(path: Path) -> Any:
    text = _read(path, str(path))
    try:
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise TenantsFileError(f"{path}: it cannot be read: {_format_parse_error(error)}.") from None


def _read_keys(path: Path, number: int, entry: _Entry) -> list[str]:
    """Reads one key from each file; white space around it is ignored."""
    keys = []
    for position, name in enumerate(entry.key_files):
        where = f"{path}: tenants[{number}].key_files[{position}]"
        try:
            keys.append(check_key(_read(path.parent / name, where).strip()))
        except TenantsFileError:
            raise
        except ValueError as error:
            raise TenantsFileError(f"{where}: {error}.") from None
    return keys


def _read(path: Path, where: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise TenantsFileError(f"{where}: it has more than {_MAX_BYTES} bytes.")
        return content.decode()
    except OSError as error:
        raise TenantsFileError(f"{where}: it cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise TenantsFileError(f"{where}: it is not UTF-8 text.") from None


def _check_distinct(path: Path, keys: dict[str, tuple[str, ...]]) -> None:
    owners: dict[str, str] = {}
    for name, own in keys.items():
        for key in own:
            if key in owners:
                raise TenantsFileError(f"{path}: a key of {name} is there twice, also as one of {owners[key]}.")
            owners[key] = name


def _format_location(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return f"{path[:128]}: " if path else ""


def _format_problem(problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        return "there is no such setting"
    if problem["type"] == "missing":
        return "it is missing"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _format_parse_error(error: Exception) -> str:
    """Returns where the parser failed; never the text that stands there."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} in line {error.lineno}"
    return str(error).partition("\n")[0] if isinstance(error, tomllib.TOMLDecodeError) else type(error).__name__
