"""How much of a prompt each engine has, in blocks. Plain data."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockMatches:
    """Leading blocks of one prompt, a number for each row of the table: ``device`` are in device memory from the first
    on, and ``host`` more follow that at least the host pool has.
    """

    device: Blocks
    host: Blocks
