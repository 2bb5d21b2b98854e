"""``python -m quire_engine.kernels [LEVEL …]``: compiles the kernels ahead of time, for a wheel or image without a
compiler. Compiles for all processor levels unless some are named.
"""

import logging
import sys

from quire_engine.kernels.build import compile_ahead

logging.basicConfig(level="INFO", format="%(message)s")
compile_ahead(sys.argv[1:])
