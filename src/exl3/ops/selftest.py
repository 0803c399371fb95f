"""What serves a device, and whether it computes right on the very card in use: a few milliseconds at start-up."""

from __future__ import annotations

import torch

from exl3.errors import ArgumentError, BackendError
from exl3.ops import native, reference
from exl3.ops.pointwise import act_mul, rms_norm
from exl3.ops.products import linear
from exl3.ops.tape import Tape
from exl3.ops.weight import Weight


def describe() -> dict[str, str]:
    """One line for each device torch sees: the library that serves it with its tier or card, or why none does."""
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    lines = {}
    for name in devices:
        device = torch.device(name)
        try:
            library = native.backend(device)
            lines[name] = f"{library.name}: {library.describe(device.index or 0)} ({library.build})"
        except (BackendError, ArgumentError) as e:
            lines[name] = f"reference only: {e}"
    return lines


def self_test(device: torch.device | str = "cpu") -> None:
    """Decodes a tile, multiplies, and compares a recorded step with the eager one on `device`. Raises BackendError naming what is wrong."""
    from exl3 import codec

    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    native.backend(device)
    generator = torch.Generator().manual_seed(1)
    trellis = torch.randint(-32768, 32768, (8, 8, 64), dtype=torch.int16, generator=generator)
    suh, svh = (torch.randn(128, generator=generator).half() for _ in range(2))
    x = torch.randn(2, 128, generator=generator)
    expected = x @ codec.dequantize(trellis, suh, svh, "mul1")
    weight = Weight(trellis.to(device), suh.to(device), svh.to(device), None, 128, 128, "mul1")
    decoded = weight.reconstruct().cpu()
    if not torch.equal(decoded, codec.decode(trellis, "mul1")):
        raise BackendError(
            f"self-test on {device}: a decoded tile differs from the format; do not use this device, reinstall exl3 or its driver"
        )
    xd = x.to(device)
    error = (linear(xd, weight).cpu() - expected).norm() / expected.norm()
    if not error < 2e-3:
        raise BackendError(f"self-test on {device}: a product is off by {float(error):.1e} relative; do not use this device")

    def step(h: torch.Tensor) -> torch.Tensor:
        h = linear(rms_norm(h, None, 1e-6), weight)
        return act_mul(h, h, "silu")

    if device.type != "cpu" and "act_mul" not in native.backend(device).ops:
        return
    buffer = torch.zeros_like(xd)
    tape = Tape(device)
    with torch.no_grad(), tape:
        recorded = step(buffer)
    buffer.copy_(xd)
    tape.replay()
    with torch.no_grad():
        eager = step(xd)
    if not torch.equal(recorded, eager):
        raise BackendError(f"self-test on {device}: a recorded step differs from the eager one; set EXL3_STEP=eager and report this")
    h = reference.rms_norm(x, None, 1e-6) @ codec.dequantize(trellis, suh, svh, "mul1")
    want = reference.act_mul(h, h, "silu")
    if not (eager.cpu() - want).norm() / want.norm() < 4e-3:
        raise BackendError(f"self-test on {device}: norm or activation is wrong; do not use this device")
