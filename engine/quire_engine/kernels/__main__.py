"""``python -m quire_engine.kernels``: compiles the kernels ahead of time, for an image that has no compiler."""

import logging

from quire_engine.kernels.build import compile_ahead

logging.basicConfig(level="INFO", format="%(message)s")
compile_ahead()
