"""The Hugging Face Hub: what a repository has, and its files in the Hub's own cache (``HF_HOME``).

All is done by ``huggingface_hub``, so that its variables mean what they mean elsewhere: ``HF_HOME``, ``HF_HUB_CACHE``,
``HF_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``. A snapshot in the cache belongs to one commit, and its files appear
whole or not at all.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import httpx2
from filelock import FileLock, Timeout
from huggingface_hub import HfApi, ModelInfo, constants, get_cached_repo_tree, get_token
from huggingface_hub import errors as hub
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.tqdm import tqdm
from quire_engine.checkpoint.progress import one_bar
from quire_engine.errors import first_line
from quire_proto import __version__
from quire_proto.folders import no_such_path
from quire_proto.names import is_name
from quire_proto.terminal import waiting

from quire_cli.model.check import check_fits_disk, disk_sentence
from quire_cli.model.name import HubName, ModelNotFoundError, Say

MAX_CHOICES = 12


def _silent(size: int) -> type[tqdm]:
    """Returns a class of no progress bar: a small file is there at once. It stops one of more than ``size`` bytes."""

    class Silent(tqdm):
        left = size

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.left -= int(n or 0)
            if self.left < 0:
                raise OSError(f"it has more than the {size} bytes that were listed")

    return Silent


class HubRepository:
    """One revision of a repository: ``files`` are the bytes of those in its root, and ``info`` what the Hub says of it.
    Every method raises ``ModelNotFoundError``.
    """

    def __init__(self, name: HubName, say: Say) -> None:
        self.name, self._say = name, say
        self._api = HfApi(library_name="quire", library_version=__version__)
        with _explained(name, self._api), waiting(f"asking {self._api.endpoint} for {name.repo}"):
            self.revision = self._api.resolve_revision(name.repo, revision=name.revision)
        self._info: ModelInfo | None = None

    @property
    def commit(self) -> str:
        """The hash of the revision."""
        return self.revision.resolved

    @property
    def info(self) -> ModelInfo:
        """What the Hub says; asked once."""
        if self._info is None:
            with _explained(self.name, self._api), waiting(f"asking for the files of {self.name.repo}"):
                self._info = self._api.model_info(self.name.repo, revision=self.commit, files_metadata=True)
        return self._info

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file; of a commit that was downloaded from before, without asking the Hub."""
        with suppress(hub.CachedRepoTreeNotFoundError):
            known = get_cached_repo_tree(self.name.repo, revision=self.commit)
            return {each.path: each.size for each in known if is_name(each.path)}
        return {each.rfilename: each.size or 0 for each in self.info.siblings or [] if is_name(each.rfilename)}

    @property
    def elements(self) -> Mapping[str, int] | None:
        """Elements of each safetensors type, where the Hub has counted them."""
        return self.info.safetensors.parameters if self.info.safetensors else None

    @property
    def gguf_architecture(self) -> str | None:
        """The architecture of GGUF files, where the Hub has read it."""
        return (self.info.gguf or {}).get("architecture")

    def snapshot(self) -> Path:
        """The folder of the revision in the cache, which need not exist."""
        return self._storage / "snapshots" / self.commit

    def download_small(self, file: str) -> Path:
        """The folder with a small ``file``, which is downloaded if it is missing."""
        with _explained(self.name, self._api):
            silent = _silent(self.files.get(file, 0))
            path = self._api.hf_hub_download(self.name.repo, file, revision=self.commit, tqdm_class=silent)
        return Path(path).parent

    def download(self, files: list[str]) -> Path:
        """The folder with ``files``, of which those that are missing are downloaded, if there is room on the disk."""
        missing = [each for each in self.info.siblings or [] if each.rfilename in files and not self._is_cached(each)]
        size = sum(each.size or 0 for each in missing)
        self._remove_leftovers()
        check_fits_disk(str(self.name), size, self._storage)
        if missing:
            self._say(
                f"downloading {self.name.repo} at {self.commit[:8]}: {len(missing)} files, {size / 1e9:.2f} GB, into "
                f"{constants.HF_HUB_CACHE}"
            )
        with _explained(self.name, self._api), one_bar(self.name.repo, size) as bar:
            folder = self._api.snapshot_download(
                self.name.repo, revision=self.revision, allow_patterns=files, max_workers=4, tqdm_class=bar
            )
        return Path(folder)

    @property
    def _storage(self) -> Path:
        name = repo_folder_name(repo_id=self.name.repo, repo_type="model")
        return Path(constants.HF_HUB_CACHE).expanduser().resolve() / name

    def _is_cached(self, file: Any) -> bool:
        blob = file.lfs.sha256 if file.lfs else file.blob_id
        return (self.snapshot() / file.rfilename).exists() or (self._storage / "blobs" / str(blob)).exists()

    def _remove_leftovers(self) -> None:
        """Removes what a process that was killed in mid-download has left: nothing continues it, and it takes space.
        A file whose lock is taken is being downloaded.
        """
        locks = self._storage.parent / ".locks" / self._storage.name
        for file in self._storage.glob("blobs/*.incomplete"):
            lock = locks / f"{file.name.partition('.')[0]}.lock"
            with suppress(Timeout, OSError):
                lock.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(lock, timeout=0):
                    file.unlink(missing_ok=True)

    def broken_files(self) -> list[str]:
        """The files in the cache that have not the size which the Hub told when they were downloaded."""
        try:
            known = {each.path: each.size for each in get_cached_repo_tree(self.name.repo, revision=self.commit)}
        except hub.CachedRepoTreeNotFoundError:
            return []
        folder = self.snapshot()
        found = {file: folder / file for file in known if (folder / file).is_file()}
        return sorted(file for file, path in found.items() if path.stat().st_size != known[file])


@contextmanager
def _explained(name: HubName, api: HfApi) -> Iterator[None]:
    """What can go wrong at the Hub, each in one sentence that says what to do."""
    try:
        yield
    except Exception as error:
        for kinds, explain in _SENTENCES:
            if isinstance(error, kinds):
                raise ModelNotFoundError(explain(name, api, error)) from None
        raise


def _gated(name: HubName, api: HfApi, _: Exception) -> str:
    page = f"{api.endpoint}/{name.repo}"
    if get_token():
        return f"{name} is gated, and the account of your token has no access yet: accept its licence at {page}."
    return f"{name} is gated: accept its licence at {page}, and set HF_TOKEN to a token of that account."


def _unknown(name: HubName, api: HfApi, _: Exception) -> str:
    advice = "check the name."
    with suppress(Exception):  # only a hint: whatever fails, there is none
        found = [each.id for each in api.list_models(search=name.repo.partition("/")[2], sort="downloads", limit=10)]
        close = get_close_matches(name.repo, found, n=1, cutoff=0)
        advice = f"did you mean {close[0]}?" if close else advice
    private = "a private one that your token has no access to" if get_token() else "a private one, which needs HF_TOKEN"
    missing = f"{no_such_path(name.repo)}, and {api.endpoint} has no model of this name, or it is {private}"
    return f"{missing}: {advice}"


def _unknown_revision(name: HubName, api: HfApi, _: Exception) -> str:
    advice = "take another."
    with suppress(Exception):
        refs = api.list_repo_refs(name.repo)
        known = [each.name for each in (*refs.branches, *refs.tags)][:MAX_CHOICES]
        advice = f"take {', '.join(known)}, or a commit by its 40 digits."
    return f"{name.repo} has no revision {name.revision}: {advice}"


def _invalid(name: HubName, _api: HfApi, _: Exception) -> str:
    return f"{name} is not a name that a model on the Hub can have: check its spelling."


def _answered(name: HubName, api: HfApi, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return f"{api.endpoint} does not know your token: set HF_TOKEN to a valid one, or unset it."
    if status == 429:
        return f"{api.endpoint} limits your requests: wait some minutes, or set HF_TOKEN, and start again."
    return f"{api.endpoint} answered with status {status} for {name}: start again later, or name a folder."


def _unreachable(name: HubName, api: HfApi, error: Exception) -> str:
    # The path comes first: the Hub's cache does not help somebody who mistyped a folder.
    missing = f"{no_such_path(name.repo)}, and {name} is not whole in {constants.HF_HUB_CACHE}"
    if constants.is_offline_mode():
        return f"{missing}: unset HF_HUB_OFFLINE to download the model, or name a folder."
    cause: BaseException = error
    while not isinstance(cause, httpx2.HTTPError) and cause.__cause__ is not None:
        cause = cause.__cause__
    return (
        f"{missing}; {api.endpoint} cannot be reached ({first_line(cause)}): check the network and start again, name a "
        "mirror with HF_ENDPOINT, or name a folder."
    )


def _failed(name: HubName, _api: HfApi, error: Exception) -> str:
    if sentence := disk_sentence(error, Path(constants.HF_HUB_CACHE)):
        return sentence
    return f"{name} could not be downloaded ({first_line(error)}): start again, and what is whole already stays."


# The first kind that fits counts: the Hub's errors are also errors of HTTP and of the system.
_SENTENCES: tuple[tuple[Any, Callable[[HubName, HfApi, Exception], str]], ...] = (
    (hub.GatedRepoError, _gated),
    (hub.RepositoryNotFoundError, _unknown),
    (hub.RevisionNotFoundError, _unknown_revision),
    (hub.HFValidationError, _invalid),
    (hub.HfHubHTTPError, _answered),
    ((hub.RevisionResolutionError, hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled), _unreachable),
    (httpx2.HTTPError, _unreachable),
    ((OSError, ValueError, RuntimeError), _failed),
)
