"""The folder of a model that is given by its name on the Hugging Face Hub, as ``LLM("ORG/NAME")``."""

import re
from functools import partial
from pathlib import Path

from quire_proto.folders import no_such_path
from quire_proto.text.file_names import TEMPLATE_FOLDER

from quire_engine.errors import ModelError, first_line

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@:\s]+))?")
FILES = ("*.json", "*.jinja", "*.safetensors")  # what is read of a repository: no code, nothing in pickle
TEMPLATES = f"{TEMPLATE_FOLDER}/*.jinja"


def find_model_folder(model: str | Path, *, allow_download: bool = False) -> Path:
    """``model`` itself if it is there, or the folder in the Hub's local cache of ``ORG/NAME`` or
    ``ORG/NAME@REVISION``, where a revision is a branch, a tag or a commit. With ``allow_download`` what is missing
    there is downloaded, of one commit. Raises ``ModelError`` for a model that the cache has not, or the Hub.
    """
    path, found = Path(model), _HUB_NAME.fullmatch(str(model))
    if isinstance(model, Path) or found is None or path.exists():
        return path
    # It takes a fifth of a second to import.
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
            folder = fetch(allow_patterns=list(FILES), ignore_patterns=["*/*"])  # there are copies for other libraries
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
