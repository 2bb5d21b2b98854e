"""``CachedModel``: a model in the Hub's cache, or a copy that Quire made of one in a bucket or a registry."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import CachedRepoInfo, CacheNotFound, HFCacheInfo, scan_cache_dir
from quire_proto.folders import user_cache_folder, user_state_folder

from quire_cli.machine.running import RunningServer
from quire_cli.model.copies import copies_of
from quire_cli.model.name import HubName, ModelNotFoundError, read_name

Kind = Literal["hub", "s3", "oci"]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """``name`` is what ``quire serve`` takes, ``size`` its bytes on the disk, and ``last_used`` Unix time. ``delete``
    removes it, or the one revision that was asked for.
    """

    name: str
    kind: Kind
    size: int
    last_used: float
    path: Path
    revisions: int
    delete: Callable[[], None]

    def is_served_by(self, server: RunningServer) -> bool:
        """Whether a server reads these files."""
        with suppress(ModelNotFoundError):
            source = read_name(server.source)
            if isinstance(source, HubName):
                return self.kind == "hub" and source.repo == self.name.partition("@")[0]
            if not isinstance(source, Path):
                return str(source) == self.name
        return Path(server.source).resolve().is_relative_to(self.path)


def cached_models() -> list[CachedModel]:
    """Returns all of them, the one that was used last first."""
    return sorted([*_of_hub(), *_copies("s3"), *_copies("oci")], key=lambda model: model.last_used, reverse=True)


def find_cached(text: str) -> CachedModel | None:
    """Returns the model that ``text`` names, as ``quire list`` or ``quire serve`` does; ``ORG/NAME@REVISION`` is one
    revision of it.
    """
    models = {each.name: each for each in reversed(cached_models())}  # of two with one name, the last used
    with suppress(ModelNotFoundError):
        if text not in models and not isinstance(source := read_name(text), Path):
            text = str(source)  # with a registry's default tag, without a prefix of the Hub or a last slash
    name, _, revision = text.partition("@")
    model = models.get(text)
    if model is not None or not revision:
        return model
    for cache, repository in _repositories():
        for each in repository.revisions:
            if repository.repo_id == name and (revision in each.refs or each.commit_hash == revision):
                plan = cache.delete_revisions(each.commit_hash)
                used, size = repository.last_accessed, plan.expected_freed_size
                return CachedModel(text, "hub", size, used, each.snapshot_path, 1, plan.execute)
    return None


def kept_by_quire() -> dict[Path, int]:
    """Returns the bytes in the folders that Quire keeps for itself: kernels and tokenizers, requests and history."""
    found: dict[Path, int] = {}
    for folder in (user_cache_folder, user_state_folder):
        with suppress(RuntimeError):
            if size := sum(file.lstat().st_size for file in folder().rglob("*") if file.is_file()):
                found[folder()] = size
    return found


def _repositories() -> Iterator[tuple[HFCacheInfo, CachedRepoInfo]]:
    with suppress(CacheNotFound):
        cache = scan_cache_dir()
        yield from ((cache, repository) for repository in cache.repos if repository.repo_type == "model")


def _of_hub() -> Iterator[CachedModel]:
    for cache, repository in _repositories():
        plan = cache.delete_revisions(*(each.commit_hash for each in repository.revisions))
        yield CachedModel(
            repository.repo_id,
            "hub",
            repository.size_on_disk,
            repository.last_accessed,
            repository.repo_path,
            len(repository.revisions),
            plan.execute,
        )


def _copies(kind: Literal["s3", "oci"]) -> Iterator[CachedModel]:
    for name, folder in copies_of(kind):
        blobs = [file.stat() for file in folder.glob("blobs/*")]
        used = max((blob.st_atime for blob in blobs), default=folder.stat().st_mtime)
        size, revisions = sum(blob.st_size for blob in blobs), len([*folder.glob("snapshots/*")])
        yield CachedModel(name, kind, size, used, folder, revisions, lambda folder=folder: shutil.rmtree(folder))  # type: ignore[misc]
