"""Reads a model's files into the page cache while torch is imported, many parts at once. A single reader that faults in
one page at a time gets only a fraction of the speed of a disk or a network file system. vLLM's
``--safetensors-load-strategy prefetch`` does the same.
"""

import logging
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from quire_engine.device.host import ROOT, available_memory

log = logging.getLogger(__name__)
PART_BYTES = 16 << 20
NUM_THREADS = 8
WEIGHTS = ("*.safetensors", "*.gguf")


def prefetch_weights(model: Path, root: Path = ROOT) -> list[Thread]:
    """Starts reading the weights of a folder or of a GGUF file. Returns the threads, which end by themselves or with
    the process. Starts none if the weights need more than half of the available memory, because the page cache would
    then lose the first parts before they are used. Files that cannot be read are left to the loader, which reports why.
    """
    files = [model] if model.is_file() else sorted(chain.from_iterable(map(model.glob, WEIGHTS)))
    try:
        parts = [part for file in files for part in _parts(file)]
    except OSError:
        return []
    size = sum(count for _, _, count in parts)
    if size > available_memory(root) // 2:
        log.info("%d MiB of weights are not read ahead: less than twice as much memory is left", size >> 20)
        return []
    queue: SimpleQueue[tuple[Path, int, int]] = SimpleQueue()
    for part in parts:
        queue.put(part)
    threads = [Thread(target=_read_all, args=(queue,), name="prefetch", daemon=True) for _ in parts[:NUM_THREADS]]
    for thread in threads:
        thread.start()
    return threads


def _parts(file: Path) -> Iterator[tuple[Path, int, int]]:
    size = file.stat().st_size
    for start in range(0, size, PART_BYTES):
        yield file, start, min(PART_BYTES, size - start)


def _read_all(queue: "SimpleQueue[tuple[Path, int, int]]") -> None:
    while True:
        try:
            file, start, count = queue.get_nowait()
            descriptor = os.open(file, os.O_RDONLY)
        except (Empty, OSError):
            return
        try:
            # Copies nothing, and costs nothing for cached parts. The call waits while the disk is busy.
            os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_WILLNEED)
        except OSError:
            return
        finally:
            os.close(descriptor)
