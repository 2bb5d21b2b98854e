"""The demo model, made to call tools: its template supports them, and its rarest token begins a call."""

import shutil
from pathlib import Path

from tests.support.marked_demo import DEMO, MARK_ID, write_marked_tokenizer
from tests.support.tool_models import HERMES_TEMPLATE

CALL = MARK_ID
"""The token that begins a call."""


def make_model(folder: Path) -> Path:
    """The model's folder, which is made in ``folder``."""
    made = Path(shutil.copytree(DEMO, folder / DEMO.name, dirs_exist_ok=True))
    template = HERMES_TEMPLATE.replace("<|start|>", "<|im_start|>").replace("<|end|>", "<|im_end|>")
    (made / "chat_template.jinja").write_text(template)
    write_marked_tokenizer(made, "<tool_call>")
    return made
