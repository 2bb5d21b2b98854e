"""How much of a prompt each engine has, in blocks. Plain data."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire_router.placement.query import Matches

Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockMatches:
    """Leading blocks of one prompt, a number for each row of the table: ``device`` are in device memory from the first
    on, and ``host`` more follow that at least the host pool has.
    """

    device: Blocks
    host: Blocks

    def tokens(self, prompt_tokens: int, block_size: int) -> Matches:
        """The same in tokens, as far as an engine makes use of it: one token of a prompt is always computed."""
        most = (prompt_tokens - 1) // block_size
        device = np.minimum(self.device, most)
        host = np.minimum(self.device + self.host, most) - device
        return Matches(device=(device * block_size).astype(np.float64), host=(host * block_size).astype(np.float64))
