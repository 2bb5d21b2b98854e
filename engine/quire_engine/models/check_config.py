"""``python -m quire_engine.models.check_config FOLDER``: whether the model of a ``config.json`` would be served. Exits
with 1 and the sentence with which the engine would refuse it. For processes that do not import torch.
"""

import sys
from pathlib import Path

from quire_engine.errors import ModelError
from quire_engine.models.loader import read_model_config


def main() -> None:
    """Reads the configuration as the engine does; no weights are needed."""
    try:
        read_model_config(Path(sys.argv[1]))
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
