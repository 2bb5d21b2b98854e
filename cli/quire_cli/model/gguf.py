"""``fetch_gguf``: one GGUF file of a repository that has them in several quantisations, downloaded alone."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from quire_engine.checkpoint.gguf import GGUF_ARCHITECTURES, GGUF_SUFFIX
from quire_engine.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE
from quire_proto.text.file_names import is_text_file

from quire_cli.model.check import TOKENIZER_FILE, MemoryNeed, check_fits_memory
from quire_cli.model.fetch import Repository, broken_copy
from quire_cli.model.name import ModelNotFoundError

_TAG = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|B?F16|FP16|F32|MXFP\d)\w*)$", re.IGNORECASE)
_READ = re.compile(r"(?:UD-)?(?:Q[4568]_|B?F16|FP16|F32)", re.IGNORECASE)  # types of tensors that the engine reads
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_PROJECTOR = "mmproj"  # begins the names of what turns images into tokens


def has_only_gguf(files: Iterable[str]) -> bool:
    """Whether a repository's weights are GGUF files, and nothing else that is served."""
    names = set(files)
    return bool(_models(names)) and not names & {SINGLE_FILE, INDEX_FILE, "adapter_config.json"}


class GgufRepository(Repository, Protocol):
    """One whose GGUF files have been looked into."""

    @property
    def gguf_architecture(self) -> str | None:
        """The ``general.architecture`` of its files, if it is known."""


def fetch_gguf(repository: GgufRepository, wanted: str | None, need: MemoryNeed | None) -> Path:
    """The GGUF file of ``repository`` that ``wanted`` names (a file, or a quantisation such as ``Q4_K_M`` in any case);
    without one, the only file. It is downloaded, with the tokenizer's files if they are next to it, unless it cannot be
    served or does not fit. Raises ``ModelNotFoundError``.
    """
    name, files = str(repository.name), repository.files
    file = choose(name.partition(":")[0], files, wanted)
    folder = file.rpartition("/")[0]
    beside = [each for each in files if is_text_file(each, folder)]
    if f"{folder}/{TOKENIZER_FILE}".lstrip("/") not in files:
        beside = []
    chosen = [file, *beside]
    snapshot = repository.snapshot()
    if not all((snapshot / each).is_file() for each in chosen):
        architecture = repository.gguf_architecture
        if architecture is not None and architecture not in GGUF_ARCHITECTURES:
            raise ModelNotFoundError(
                f"{name} has the architecture {architecture}, and of GGUF files read are "
                f"{', '.join(GGUF_ARCHITECTURES)}: take the original model, or another one."
            )
        check_fits_memory(name, {"U8": files[file]}, {}, need)
        snapshot = repository.download(chosen)
    if broken := [each for each in repository.broken_files() if each in chosen]:
        raise ModelNotFoundError(broken_copy(name, snapshot, broken))
    return snapshot / file


def choose(repo: str, files: Mapping[str, int], wanted: str | None) -> str:
    """The one of ``files`` that ``wanted`` names. Raises ``ModelNotFoundError`` that lists what can be named."""
    models = _models(files)
    if not models:
        raise ModelNotFoundError(f"{repo} has no GGUF files: name it without what stands behind the colon.")
    found = models if wanted is None else _named(models, wanted.casefold())
    whole = [each for each in found if not _SPLIT.search(_stem(each))]
    if found and not whole:
        raise ModelNotFoundError(
            f"{found[0]} of {repo} is a part of a split file, which is not read: {_advice(repo, models)}."
        )
    if len(found) != 1:
        has = f"{len(found) or 'no'} GGUF files{'' if wanted is None else f' for {wanted}'}"
        raise ModelNotFoundError(f"{repo} has {has}: {_advice(repo, whole or models)}.")
    tag = tag_of(whole[0])
    if tag is not None and not _READ.match(tag):
        raise ModelNotFoundError(f"{whole[0]} of {repo} has weights in {tag}, not read: {_advice(repo, models)}.")
    return whole[0]


def tag_of(file: str) -> str | None:
    """The quantisation that the name of a GGUF file ends in."""
    found = _TAG.search(_SPLIT.sub("", _stem(file)))
    return found[1] if found else None


def _named(models: Iterable[str], wanted: str) -> list[str]:
    """Returns the files of that name; without one, the files of that quantisation."""
    files = [each for each in models if wanted in (each.casefold(), each.rpartition("/")[2].casefold())]
    return files or [each for each in models if (tag_of(each) or "").casefold() == wanted]


def _models(files: Iterable[str]) -> list[str]:
    return sorted(
        each
        for each in files
        if each.lower().endswith(GGUF_SUFFIX) and not each.rpartition("/")[2].lower().startswith(_PROJECTOR)
    )


def _stem(file: str) -> str:
    return file.rpartition("/")[2][: -len(GGUF_SUFFIX)]


def _advice(repo: str, models: list[str]) -> str:
    """What can be named instead: quantisations, or files where those do not tell them apart."""
    usable = [each for each in models if not _SPLIT.search(_stem(each)) and _READ.match(tag_of(each) or "F16")]
    tags = [tag_of(each) for each in usable]
    if not usable:
        return "take the original model, or another one"
    distinct = None not in tags and len(set(tags)) == len(tags)
    names = [str(tag) for tag in tags] if distinct else usable
    others = f" (there are {', '.join(names)})" if len(names) > 1 else ""
    return f"take {repo}:{names[0]}{others}"
