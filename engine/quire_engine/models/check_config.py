"""``python -m quire_engine.models.check_config FOLDER``: checks whether the engine would serve the model of a
``config.json``. If not, exits with 1 and prints the sentence with which the engine would refuse it. For processes that
do not import torch.
"""

import sys
from pathlib import Path

from quire_engine.errors import ModelError
from quire_engine.models.loader import read_model_config


def main() -> None:
    """Reads the configuration like the engine; needs no weights."""
    try:
        read_model_config(Path(sys.argv[1]))
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
