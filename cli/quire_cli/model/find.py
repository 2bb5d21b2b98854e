"""``find_model``: from what a user types to a folder or file that an engine can serve."""

import sys
from dataclasses import dataclass
from pathlib import Path

from quire_engine.checkpoint.gguf import GGUF_SUFFIX
from quire_engine.checkpoint.weight_files import SINGLE_FILE, what_is_there
from quire_proto.text.file_names import missing_tokenizer
from safetensors import SafetensorError, safe_open

from quire_cli.model.check import CONFIG_FILE, TOKENIZER_FILE, MemoryNeed, check_config, missing_files, weight_files
from quire_cli.model.fetch import fetch_folder
from quire_cli.model.gguf import fetch_gguf, has_only_gguf
from quire_cli.model.name import EXAMPLE, HubName, ModelNotFoundError, OciName, S3Name, Say, read_name, served_name

LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how the file begins that a clone has without Git LFS


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that is here, whole. ``path`` is a folder or a GGUF file, as ``--model`` of the engine takes it, ``name``
    what clients ask for unless they are given another, and ``revision`` identifies the files that were downloaded: on
    the Hub, the commit.
    """

    path: Path
    name: str
    revision: str | None = None


def find_model(text: str, need: MemoryNeed | None = None, say: Say | None = None) -> FoundModel:
    """Finds the model that ``text`` names, and downloads it if it is not here.

    ``ORG/NAME`` and ``ORG/NAME@REVISION`` are on the Hugging Face Hub, where ``:Q4_K_M`` behind them names one of the
    GGUF files; ``s3://BUCKET/PREFIX`` is in object storage, and ``oci://REGISTRY/REPOSITORY:TAG`` in a registry of
    containers; a folder and a ``.gguf`` file are local; what exists as a path is that path. With ``need``, a model that
    does not fit into memory is refused before the download. ``say`` is called with what takes long; by default it is
    written to standard error, where progress bars are too.
    Raises ``ModelNotFoundError`` with one sentence that says what to do.
    """
    name = read_name(text)
    if isinstance(name, Path):
        return _local(name, need)
    if isinstance(name, S3Name):
        return _from_s3(name, need, say or _say)
    if isinstance(name, OciName):
        return _from_registry(name, need, say or _say)
    return _from_hub(name, need, say or _say)


def _from_hub(name: HubName, need: MemoryNeed | None, say: Say) -> FoundModel:
    from quire_cli.model.hub import HubRepository

    repository = HubRepository(name, say)
    is_here = name.file is None and not missing_files(repository.snapshot())
    if not is_here and (name.file or has_only_gguf(repository.files)):
        path = fetch_gguf(repository, name.file, need)
    else:
        path = fetch_folder(repository, need)
    return FoundModel(path, name.repo, repository.commit)


def _from_s3(name: S3Name, need: MemoryNeed | None, say: Say) -> FoundModel:
    from quire_cli.model.s3 import open_s3

    copy = open_s3(name, say)
    return FoundModel(fetch_folder(copy, need), name.served, copy.commit)


def _from_registry(name: OciName, need: MemoryNeed | None, say: Say) -> FoundModel:
    from quire_cli.model.oci import open_oci

    copy = open_oci(name, say)
    return FoundModel(fetch_folder(copy, need), name.served, copy.commit)


def _local(path: Path, need: MemoryNeed | None) -> FoundModel:
    """A folder or file that is here, whose weights are whole by their headers and sizes."""
    if path.is_file():
        if path.suffix != GGUF_SUFFIX:
            raise ModelNotFoundError(
                f"{path} is not a GGUF file: name one, a model folder, or a model such as {EXAMPLE}."
            )
        return FoundModel(path, served_name(path.stem))
    files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if (path / CONFIG_FILE).is_file():
        check_config(path, str(path), need, ask_engine=False)
    missing = missing_files(path)
    if missing and (CONFIG_FILE not in missing or not files):
        first = CONFIG_FILE if CONFIG_FILE in missing else missing[0]
        near = _model_below(path.resolve()) if first == CONFIG_FILE else None
        plain = f"{path.resolve()} is not a model folder that can be served: it has no {first}"
        plain += f" (did you mean {near}?)." if near else "."
        raise ModelNotFoundError(_in_other_form(path, first) or plain)
    if CONFIG_FILE in missing and len(files) > 1:
        raise ModelNotFoundError(f"{path} has {len(files)} GGUF files: name one of them, such as {files[0]}.")
    for name in sorted(weight_files(path)) if not missing else ():
        _check_weights(path / name)
    return FoundModel(path, served_name(path.resolve().name))


def _model_below(folder: Path) -> Path | None:
    """The first folder with a model, at most two levels below ``folder``: as in a repository, or the Hub's cache."""
    found = sorted(config for depth in ("*", "*/*") for config in folder.glob(f"{depth}/{CONFIG_FILE}"))
    return next((config.parent for config in found if not missing_files(config.parent)), None)


def _in_other_form(folder: Path, missing: str) -> str | None:
    """The sentence with the command that converts what a folder has in place of a ``missing`` file; None if it has no
    such thing.
    """
    if missing == SINGLE_FILE:
        sentence = what_is_there(folder)
    elif missing == TOKENIZER_FILE:
        sentence = missing_tokenizer(folder)
    else:
        return None
    return sentence if "python -c" in sentence else None


def _check_weights(file: Path) -> None:
    """Raises ``ModelNotFoundError`` for a safetensors file that is not whole, or only a pointer to one."""
    try:
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        with file.open("rb") as reading:
            is_pointer = reading.read(len(LFS_POINTER)) == LFS_POINTER
        raise ModelNotFoundError(
            f"{file} is a pointer of Git LFS, not the weights: run git lfs pull in {file.parent}."
            if is_pointer
            else f"{file} is not a whole safetensors file ({error}): copy or download it again."
        ) from None
    except OSError as error:
        raise ModelNotFoundError(f"{file} cannot be read: {error.strerror or error}.") from None


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
