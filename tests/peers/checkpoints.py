"""Makes the small checkpoints that stand for other projects' models: ``python -m tests.peers.checkpoints FOLDER``."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.adapters import write_adapter
from tests.support.sentence_folders import cross_encoder_folder, encoder_folder

ROOT = Path(__file__).parents[2]
_CONTEXT = 32768  # as the models have that it stands for; the demo model learnt 2,048
_LONGEST_ANSWER = 512  # where a request has no limit: the demo model does not always end its answer


def flags_in(text: str) -> list[str]:
    """Returns the flags that a help text lists."""
    return sorted(set(re.findall(r"^\s+(--[a-z][a-z-]*)", text, re.MULTILINE)))


def _set(path: Path, **values: int) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def main(folder: Path) -> None:
    """Makes what the folder lacks: a chat model with an adapter, an encoder, a cross-encoder, and the list of flags."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "chat").exists():
        shutil.copytree(ROOT / "demo" / "model", folder / "chat")
        shutil.copy(ROOT / "demo" / "templates" / "hermes.jinja", folder / "chat" / "chat_template.jinja")  # has tools
        _set(folder / "chat" / "config.json", max_position_embeddings=_CONTEXT)
        _set(folder / "chat" / "generation_config.json", max_new_tokens=_LONGEST_ANSWER)
    if not (folder / "lora").exists():
        write_adapter(folder / "lora", folder / "chat")
    for name, make in (("embed", encoder_folder), ("rerank", cross_encoder_folder)):
        if not (folder / name).exists():
            make(folder / name)
    command = [sys.executable, "-m", "quire_cli.main", "serve", "--help-all"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (folder / "flags.txt").write_text("\n".join(flags_in(shown)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
