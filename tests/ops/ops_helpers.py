"""Stand-ins and measures shared by the tests of ops."""

from types import SimpleNamespace

import torch

from exl3.cache import Layer


def rms_error(got, want):
    """Relative root-mean-square error in fp64."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def poisoned(shape, dtype=torch.float32):
    """A buffer full of NaN: whatever an operation forgets to write shows."""
    return torch.full(shape, float("nan"), dtype=dtype)


def indices(rows, pages_of, padding=0):
    """Batch-like indices for rows of (first position, count) with the pages of each row; `padding` tokens follow."""
    positions, token_row = [], []
    for r, (start, count) in enumerate(rows):
        positions += range(start, start + count)
        token_row += [r] * count
    width = max(len(p) for p in pages_of)
    i32 = {"dtype": torch.int32}
    return SimpleNamespace(
        positions=torch.tensor(positions + [0] * padding, **i32),
        token_row=torch.tensor(token_row + [-1] * padding, **i32),
        block_table=torch.tensor([list(p) + [0] * (width - len(p)) for p in pages_of], **i32),
    )


def filled_layer(kv_heads, head_dim, lengths, k_bits=16, v_bits=16, compand=0.0, spare=2):
    """A layer whose rows hold random keys and values in scattered pages -> (layer, pages of each row, k and v of each row)."""
    from exl3 import ops

    need = [-(-n // 256) for n in lengths]
    total = sum(need) + spare
    order = torch.randperm(total).tolist()
    layer = Layer(total, kv_heads, head_dim, torch.device("cpu"), k_bits, v_bits, compand)
    pages, contents = [], []
    for n, count in zip(lengths, need):
        mine, order = order[:count], order[count:]
        k, v = (torch.randn(n, kv_heads, head_dim) for _ in range(2))
        ops.reference.cache_append(layer, k, v, indices([(0, n)], [mine]))
        pages.append(mine)
        contents.append((k, v))
    return layer, pages, contents
