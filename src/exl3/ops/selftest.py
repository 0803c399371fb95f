"""What serves a device, and whether it computes right on the very card in use: a few milliseconds at start-up."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from exl3.errors import ArgumentError, BackendError
from exl3.ops import native, reference
from exl3.ops.attention import attention, cache_append, cache_read
from exl3.ops.pointwise import act_mul, rms_norm
from exl3.ops.products import active_planes, linear
from exl3.ops.tape import Tape
from exl3.ops.weight import Weight

# each call tests with other numbers: memory that still holds the last call's right results must not pass for an answer
_calls = count(1)


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
    """Decodes a tile, multiplies, attends over a small cache, and compares a recorded step with the eager one on `device`. Raises
    BackendError naming what is wrong."""
    from exl3 import codec

    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    native.backend(device)
    generator = torch.Generator().manual_seed(next(_calls))
    trellis = torch.randint(-32768, 32768, (8, 8, 64), dtype=torch.int16, generator=generator)
    suh, svh = (torch.randn(128, generator=generator).half() for _ in range(2))
    many = torch.randn(40, 128, generator=generator)  # another kernel than few rows
    x = many[:2]
    weight = Weight(trellis.to(device), suh.to(device), svh.to(device), None, 128, 128, "mul1")
    decoded = weight.reconstruct().cpu()  # before the right values are in memory that may be given out again
    if not torch.equal(decoded, codec.decode(trellis, "mul1")):
        raise BackendError(
            f"self-test on {device}: a decoded tile differs from the format; do not use this device, reinstall exl3 or its driver"
        )
    matrix = codec.dequantize(trellis, suh, svh, "mul1")
    xd = x.to(device)
    coarse = active_planes(device) == 1  # one int8 plane is a chosen trade: about 0.7 % of the result
    for rows in (x, many):
        error = (linear(rows.to(device), weight).cpu() - rows @ matrix).norm() / (rows @ matrix).norm()
        if not error < (3e-2 if coarse else 2e-3):
            raise BackendError(
                f"self-test on {device}: a product of {len(rows)} rows is off by {float(error):.1e} relative; do not use this device"
            )

    _test_attention(device)

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
    h = reference.rms_norm(x, None, 1e-6) @ matrix
    want = reference.act_mul(h, h, "silu")
    if not (eager.cpu() - want).norm() / want.norm() < (6e-2 if coarse else 4e-3):
        raise BackendError(f"self-test on {device}: norm or activation is wrong; do not use this device")


def _test_attention(device: torch.device) -> None:
    """Twenty tokens into a cache of fp16 keys and 4-bit values, in the second of its pages, then attention of the last one and of all."""
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    generator = torch.Generator().manual_seed(2)
    tokens = 20
    k, v = (torch.randn(tokens, 1, 64, generator=generator).half() for _ in range(2))
    q = torch.randn(tokens, 2, 64, generator=generator).half()

    def batch(first: int, count: int) -> Any:
        return SimpleNamespace(
            positions=torch.arange(first, first + count, **ints), token_row=torch.zeros(count, **ints),
            row_start=torch.tensor([0, count], **ints), lengths=torch.tensor([first + count], **ints), block_table=torch.ones(1, 1, **ints),
        )  # fmt: skip

    layer: Any = SimpleNamespace(  # what cache.Layer holds, a room that this one does not see
        k=torch.zeros(2, reference.PAGE, 1, 64, dtype=torch.float16, device=device), v=torch.zeros(2, reference.PAGE, 8, **ints),
        k_scale=None, v_scale=torch.zeros(2, reference.PAGE, 2, dtype=torch.float16, device=device),
        kv_heads=1, head_dim=64, k_bits=16, v_bits=4, compand=0.0, pages=2,
    )  # fmt: skip
    want_k = k[:, 0].float()
    cache_append(layer, k.to(device), v.to(device), batch(0, tokens))
    read = cache_read(layer, batch(0, tokens).block_table[0], 0, tokens, torch.float32)
    if not torch.equal(read[0][:, 0].cpu(), want_k):
        raise BackendError(f"self-test on {device}: the cache does not give back what was put in; do not use this device")
    values = read[1][:, 0].cpu()
    hidden = torch.arange(tokens) > torch.arange(tokens).view(-1, 1, 1)  # positions behind a token
    want = (q.float() @ want_k.T * 0.125).masked_fill(hidden, float("-inf")).softmax(-1) @ values
    for first in (tokens - 1, 0):
        y = attention(q[first:].to(device), layer, batch(first, tokens - first), scale=0.125).cpu().float()
        if not (y - want[first:]).norm() < 4e-3 * y.norm() or not (values - v[:, 0].float()).norm() < 0.2 * v.float().norm():
            raise BackendError(f"self-test on {device}: attention of {len(y)} tokens over the cache is wrong; do not use this device")
