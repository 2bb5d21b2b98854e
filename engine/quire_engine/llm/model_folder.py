"""The folder of a model that is given by its name on the Hugging Face Hub, as in ``LLM("ORG/NAME")``."""

import re
from functools import partial
from pathlib import Path

from quire_proto.folders import no_such_path
from quire_proto.text.file_names import TEMPLATE_FOLDER

from quire_engine.errors import ModelError, first_line

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@:\s]+))?")
FILES = ("*.json", "*.jinja", "*.safetensors")  # the files that are used: no code, no pickle
TEMPLATES = f"{TEMPLATE_FOLDER}/*.jinja"


def find_model_folder(model: str | Path, *, allow_download: bool = False) -> Path:
    """Returns ``model`` itself if it exists, or the folder in the Hub's local cache for ``ORG/NAME`` or
    ``ORG/NAME@REVISION``. A revision is a branch, a tag or a commit. With ``allow_download``, missing files are
    downloaded, all of one commit. Raises ``ModelError`` if neither the cache has the model, or, with
    ``allow_download``, the Hub.
    """
    path, found = Path(model), _HUB_NAME.fullmatch(str(model))
    if isinstance(model, Path) or found is None or path.exists():
        return path
    # Importing it takes 0.2 s.
    from huggingface_hub import errors, snapshot_download

    from quire_engine.checkpoint.progress import one_bar

    try:
        with one_bar(found["repo"]) as bar:
            fetch = partial(
                snapshot_download,
                found["repo"],
                revision=found["revision"],
                local_files_only=not allow_download,
                tqdm_class=bar,
            )
            fetch(allow_patterns=[TEMPLATES])
            folder = fetch(allow_patterns=list(FILES), ignore_patterns=["*/*"])  # subfolders are for other libraries
    except errors.LocalEntryNotFoundError as error:
        if allow_download:
            raise ModelError(
                f"{model} cannot be downloaded: {first_line(error)}; and {no_such_path(str(model))}."
            ) from None
        raise ModelError(
            f"{no_such_path(str(model))}, and the Hugging Face Hub's local cache has no such model: download it first "
            "(hf download), or let LLM do so with allow_download=True."
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise ModelError(f"{model} cannot be downloaded: {first_line(error)}.") from None
    return Path(folder)
