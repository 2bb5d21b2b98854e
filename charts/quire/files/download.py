"""Downloads one revision of a model: REPOSITORY REVISION FOLDER [PATTERN ...]. What is in the folder already stays."""

import sys

from huggingface_hub import snapshot_download

repository, revision, folder, *patterns = sys.argv[1:]
snapshot_download(
    repository,
    revision=revision,
    local_dir=folder,
    allow_patterns=patterns or ["*.json", "*.jinja", "*.safetensors"],
    ignore_patterns=["original/*", "consolidated*"],  # the same weights in another form
    max_workers=4,
)
print(f"{repository} at {revision} is in {folder}.")
