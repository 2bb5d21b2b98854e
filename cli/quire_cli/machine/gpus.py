"""GPUs, found without torch and without starting anything on them."""

import os
from pathlib import Path

from quire_engine.device.host import ROOT


def count_gpus(root: Path = ROOT) -> int:
    """NVIDIA's GPUs that a process of this environment may use, as the driver lists them."""
    listed = root / "proc/driver/nvidia/gpus"
    found = len([*listed.iterdir()]) if listed.is_dir() else len([*(root / "dev").glob("nvidia[0-9]*")])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return min(found, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
