"""The demo model, made to call tools: its template supports them, and its rarest token begins a call."""

import json
import shutil
from pathlib import Path

from tests.support.tool_models import HERMES_TEMPLATE

DEMO = Path(__file__).parents[2] / "demo" / "model"
_TOKENIZER = json.loads((DEMO / "tokenizer.json").read_text())
CALL = len(_TOKENIZER["model"]["vocab"]) - 1
"""The token that begins a call: the last that the tokenizer was given, of which no other is made."""


def make_model(folder: Path) -> Path:
    """The model's folder, which is made in ``folder``."""
    made = Path(shutil.copytree(DEMO, folder / DEMO.name, dirs_exist_ok=True))
    template = HERMES_TEMPLATE.replace("<|start|>", "<|im_start|>").replace("<|end|>", "<|im_end|>")
    (made / "chat_template.jinja").write_text(template)
    (made / "tokenizer.json").write_text(json.dumps(_with_call(json.loads((DEMO / "tokenizer.json").read_text()))))
    return made


def _with_call(tokenizer: dict) -> dict:  # type: ignore[type-arg]  # JSON
    model = tokenizer["model"]
    (rarest,) = (token for token, number in model["vocab"].items() if number == CALL)
    del model["vocab"][rarest]
    model["vocab"]["<tool_call>"] = CALL
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) != rarest]
    mark = {"id": CALL, "content": "<tool_call>", "special": False, "normalized": False}
    tokenizer["added_tokens"].append({**mark, "single_word": False, "lstrip": False, "rstrip": False})
    return tokenizer
