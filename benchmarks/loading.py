"""Measure how long models take to load and how much memory, beside what is planned for them.

    python benchmarks/loading.py --model random:llama-1b Q4_K_M bfloat16 int4
    python benchmarks/loading.py --model smollm2 stored bfloat16 int4

Formats are number formats, names of `quantize`, and `stored` for files as they are; Q4_K_M makes a random model's file
of llama.cpp's mixture and loads it as it is. Each is loaded in a process of its own, with the file in the page cache.
Memory is what the process has written (RssAnon of /proc/self/status), less what it had before the weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import torch

from forerun.config import DEFAULT_DTYPE, QUANTISATIONS, UNQUANTIZED
from forerun.lab.bench.random_model import Q4_K_M, opened
from forerun.models import Rows, load_model
from forerun.models.memory_plan import model_memory

MB = 1e6
_WARM = "bundled"
"""Loaded before anything is measured, so that libraries are imported and the kernels are compiled."""


def anonymous() -> int:
    """Return the bytes of memory that this process has written and that no file holds."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def measure(path: str, number_format: str, threads: int) -> dict[str, Any]:
    """Load a model, and return seconds and bytes."""
    torch.set_num_threads(threads)
    arguments: dict[str, Any] = {"dtype": DEFAULT_DTYPE}
    if number_format in QUANTISATIONS:
        arguments["quantize"] = number_format
    elif number_format not in (Q4_K_M, "stored"):
        arguments = {"dtype": number_format, "quantize": UNQUANTIZED}
    load_model(_WARM)
    planned = model_memory(path, **arguments)
    before = peak = anonymous()
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    model = load_model(path, **arguments)
    seconds = time.perf_counter() - start
    over.set()
    watcher.join()
    model.forward([Rows(model.new_cache(), [0])])
    after = anonymous()
    return {
        "weights": model.quantize or str(model.dtype).removeprefix("torch."),
        "seconds": seconds,
        "planned": planned.weights / MB,
        "kept": (after - before) / MB,
        "planned peak": planned.loading / MB,
        "peak": (peak - before) / MB,
    }


def main() -> None:
    """Measure the formats of the command line, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("formats", nargs="+")
    parser.add_argument("--model", default=f"random:{'llama-1b'}")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for number_format in options.formats:
        with opened(options.model, number_format, print) as path, context.Pool(1) as pool:
            row = pool.apply(measure, (path, number_format, options.threads))
        figures = [
            f"{name} {value:,.2f} s" if name == "seconds" else f"{name} {value:,.0f} MB"
            for name, value in list(row.items())[1:]
        ]
        print(f"{options.model} {number_format} ({row['weights']}): {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
