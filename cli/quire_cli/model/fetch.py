"""``fetch_folder``: downloads a model in safetensors if it can be served."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from quire_engine.checkpoint.pooler_config import MODULES_FILE
from quire_engine.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE, conversion_command
from quire_proto.text.file_names import is_text_file

from quire_cli.model.check import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    MemoryNeed,
    check_config,
    check_fits_memory,
    indexed_files,
    missing_files,
    stored_elements,
)
from quire_cli.model.name import ModelNotFoundError

SMALL_FILES = (".json", ".jinja")
MAX_READ = 64 << 20  # bytes of a JSON file that is read before the model is known to fit
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class Repository(Protocol):
    """One state of a model elsewhere, and its copy here, in which files appear whole or not at all. Every method raises
    ``ModelNotFoundError``.
    """

    @property
    def name(self) -> object:
        """As it was typed."""

    @property
    def files(self) -> Mapping[str, int]:
        """Bytes of each file."""

    @property
    def elements(self) -> Mapping[str, int] | None:
        """Elements of each safetensors type, if they are known."""

    def snapshot(self) -> Path:
        """The folder of the copy, which need not exist."""

    def download_small(self, file: str) -> Path:
        """The folder with a small ``file``, which is downloaded if it is missing."""

    def download(self, files: list[str]) -> Path:
        """The folder with ``files``, of which those that are missing are downloaded, if there is room on the disk."""

    def broken_files(self) -> list[str]:
        """The files of the copy that have not the size which they should have."""


def fetch_folder(repository: Repository, need: MemoryNeed | None) -> Path:
    """The folder of a model in safetensors, whole. Downloads what the cache has not, unless the model cannot be served
    or does not fit. Raises ``ModelNotFoundError``.
    """
    name, folder = str(repository.name), repository.snapshot()
    if broken := repository.broken_files():
        raise ModelNotFoundError(broken_copy(name, folder, broken))
    if folder.is_dir() and not missing_files(folder):
        check_config(folder, name, need, ask_engine=False)
        return folder
    files = repository.files
    _check_listing(name, files)
    folder = repository.download_small(CONFIG_FILE)
    raw = check_config(folder, name, need)
    weights = _weight_files(repository, name)
    size = sum(files[file] for file in weights)
    check_fits_memory(name, repository.elements or stored_elements(size, raw), raw, need)
    small = [file for file in files if _is_small(file, files)]
    folder = repository.download([*small, *weights])
    if wrong := missing_files(folder) or repository.broken_files():
        raise ModelNotFoundError(broken_copy(name, folder, wrong))
    return folder


def _is_small(file: str, files: Mapping[str, int]) -> bool:
    """Whether it is one of the JSON files of the root, a template, or says what a module of sentence-transformers does,
    in the module's own folder.
    """
    if "/" not in file or is_text_file(file):
        return file.endswith(SMALL_FILES)
    return MODULES_FILE in files and file.count("/") == 1 and file.endswith(f"/{CONFIG_FILE}")


def broken_copy(name: str, folder: Path, files: list[str]) -> str:
    """What to do about ``files`` in the ``folder`` of a snapshot that are not whole."""
    listed = ", ".join(files[:3])
    return f"The copy of {name} in the cache is broken ({listed}): remove {folder.parent.parent} and start again."


def _check_listing(name: str, files: Mapping[str, int]) -> None:
    """Raises ``ModelNotFoundError`` for a repository without the files that are read."""
    if CONFIG_FILE not in files:
        raise ModelNotFoundError(_without_config(name, files))
    for file in (CONFIG_FILE, INDEX_FILE):
        if files.get(file, 0) > MAX_READ:
            raise ModelNotFoundError(
                f"{file} of {name} has {files[file]} bytes, and at most {MAX_READ} are read: take another model."
            )
    if SINGLE_FILE not in files and INDEX_FILE not in files:
        pickles = [file for file in files if file.endswith(PICKLES)]
        has = f"but {pickles[0]}, a pickle, which could run code" if pickles else "nor other weights"
        raise ModelNotFoundError(
            f"{name} has no safetensors ({has}): take a revision or a copy that has them, or run "
            f"{conversion_command(name.partition('@')[0], name.partition('@')[0].rpartition('/')[2])} to make one."
        )
    if TOKENIZER_FILE not in files:
        raise ModelNotFoundError(
            f"{name} has no {TOKENIZER_FILE}: take a copy that has one, or run "
            f"{conversion_command(name.partition('@')[0], name.partition('@')[0].rpartition('/')[2])} to make one."
        )


def _without_config(name: str, files: Mapping[str, int]) -> str:
    if "adapter_config.json" in files:
        return f"{name} is an adapter (LoRA), not a model: serve its base model, with --lora-modules NAME=FOLDER."
    if "model_index.json" in files:
        return f"{name} is a pipeline of diffusers, which makes no text: take a causal language model."
    if any(file.endswith(".gguf") for file in files):
        return (
            f"{name} has GGUF files, which are read from the Hub or a disk only: take the original model, or copy "
            "one of them here, and name the file."
        )
    return f"{name} has no {CONFIG_FILE}, so it is not a model in Hugging Face's layout: take another one."


def _weight_files(repository: Repository, name: str) -> list[str]:
    """Returns the files of the weights: the single one, or the files of the index, which is downloaded."""
    files = repository.files
    if SINGLE_FILE in files:
        return [SINGLE_FILE]
    try:
        weights = sorted(indexed_files(repository.download_small(INDEX_FILE)))
    except ValueError:
        weights = []
    if not weights or not set(weights) <= set(files):
        raise ModelNotFoundError(f"{name} is not whole: its {INDEX_FILE} names files that it has not; take another.")
    return weights
