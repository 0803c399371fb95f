"""When the blocks of a product of up to 64 rows are where, in a chain of such products: what a launch takes besides multiplying.

    cmake ... -DEXL3_CUDA_STAMPS=ON
    EXL3_TEST_CUDA_LIB=libexl3_cuda.so python benchmarks/gpu_timeline.py [4096x4096x4x1 ...] [--codebook mul1]

Shapes: inputs x outputs x K x rows. Nanoseconds from the first block's begin, of the blocks that finish in the middle and of the four
that finish last; in brackets since the point before. Of few rows only where the product rotates its input itself; of more, what another
kernel does before is the time until a block goes on. Stamps take some of the time they show.
"""

from __future__ import annotations

import argparse
import ctypes

import numpy as np
import torch
from gpu_kernels import linear_call, random_weights, replay
from harness import Library, cuda_library

BLOCKS, WARPS, FINISHERS = 256, 20, 4  # cuda/stamps.cuh, cuda/product.h
POINTS = ("begins", "fetches", "waits", "goes on", "has input", "ends")
MULTIPLYING = 8  # warps above few rows: cuda/even.h, where "has input" is the first part's sums


def stamps(lib: Library, blocks: int) -> np.ndarray:
    """int64 (blocks, warps, 8) of the last launch: cycles at the points of StampPoint, then two of the card's nanoseconds."""
    found = np.zeros((BLOCKS, WARPS, 8), np.int64)
    status = lib.handle.exl3_stamps(found.ctypes.data_as(ctypes.c_void_p))
    if status:
        raise SystemExit(f"stamps could not be read: CUDA error {status}")
    return found[:blocks]


def timeline(found: np.ndarray) -> dict[str, np.ndarray]:
    """Nanoseconds (blocks,) of each point, the last warp's."""
    few = bool((found[:, :, 1] > 0).any())  # those of more rows have no point "fetches"
    if not few:
        found = found[:, :MULTIPLYING]
    cycles, times = found[..., :6], found[..., 6:]
    begin = cycles[..., 0].min(1)
    per_cycle = np.median((times[..., 1] - times[..., 0]) / (cycles[..., 5] - cycles[..., 0]))
    start = times[..., 0].min(1) - times[..., 0].min()

    def at(values: np.ndarray) -> np.ndarray:
        return start + (values - begin) * per_cycle

    points = {name: at(cycles[..., i].max(1)) for i, name in enumerate(POINTS[:-1]) if i != 1 or few} | {"begins": start}
    if not few:
        points["first part"] = points.pop("has input")
        return points | {"ends": at(cycles[..., 5].max(1))}
    ends = cycles[:, :-FINISHERS, 5]
    return points | {"first warp done": at(ends.min(1)), "multiplied": at(ends.max(1)), "ends": at(cycles[:, -FINISHERS:, 5].max(1))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=["4096x4096x4x1", "4096x14336x4x1"])
    parser.add_argument("--codebook", default="mul1")
    options = parser.parse_args()
    lib = Library(cuda_library() or "", "cuda")
    if not hasattr(lib.handle, "exl3_stamps"):
        raise SystemExit("the library was built without -DEXL3_CUDA_STAMPS=ON")
    for shape in options.shapes:
        n_in, n_out, K, rows = (float(v) for v in shape.split("x"))
        weights = random_weights(int(n_in), int(n_out), K, options.codebook)
        x = torch.randn(int(rows), int(n_in), device="cuda").half()
        us = replay([linear_call(lib, x, [w]) for w in weights])
        found = stamps(lib, torch.cuda.get_device_properties(0).multi_processor_count)
        found = found[found[:, 0, 0] > 0]
        found = found[:, found[0, :, 0] > 0]
        points = timeline(found)
        order = np.argsort(points["ends"])
        print(f"{shape}: {us:.2f} us, {len(found)} blocks")
        for name, chosen in (("middle", order[len(order) // 3 : -(len(order) // 3)]), ("last", order[-4:])):
            before, parts = 0.0, []
            for point, values in points.items():
                now = float(values[chosen].mean())
                parts.append(f"{point} {now:.0f} (+{now - before:.0f})")
                before = now
            print(f"  {name}: {', '.join(parts)}")


if __name__ == "__main__":
    main()
