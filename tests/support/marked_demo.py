"""The demo model's tokenizer with a mark that models write as one token: the rarest token becomes it."""

import json
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "demo" / "model"
MARK_ID = len(json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]) - 1
"""The mark's token: the last that the tokenizer was given, of which no other is made."""


def write_marked_tokenizer(folder: Path, mark: str) -> None:
    """Writes the tokenizer with ``mark`` into a copy of the model's folder."""
    tokenizer: dict[str, Any] = json.loads((DEMO / "tokenizer.json").read_text())
    model = tokenizer["model"]
    (rarest,) = (token for token, number in model["vocab"].items() if number == MARK_ID)
    del model["vocab"][rarest]
    model["vocab"][mark] = MARK_ID
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) != rarest]
    added = {"id": MARK_ID, "content": mark, "special": False, "normalized": False}
    tokenizer["added_tokens"].append({**added, "single_word": False, "lstrip": False, "rstrip": False})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
