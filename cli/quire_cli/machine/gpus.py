"""GPUs, found without torch and without starting anything on them."""

import os
from pathlib import Path

from quire_engine.device.host import ROOT


def visible_gpus(root: Path = ROOT) -> list[str]:
    """NVIDIA's GPUs that a process of this environment may use, by the names that ``CUDA_VISIBLE_DEVICES`` takes: those
    that it has, or the numbers of all that the driver lists.
    """
    listed = root / "proc/driver/nvidia/gpus"
    found = len([*listed.iterdir()]) if listed.is_dir() else len([*(root / "dev").glob("nvidia[0-9]*")])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(found)]
    names = [name.strip() for name in visible.split(",")]
    return [name for name in names if name not in ("", "-1")][:found]
