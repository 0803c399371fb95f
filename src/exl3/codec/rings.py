"""Bit rings: 256 weights of a tile as one circular bit string, read through sliding 16-bit windows.

Position i of the ring brings D(i) new bits; the state of position i is the 16 ring bits that end with them. The ring
has no beginning: the first windows reach back to its end (tail-biting). Any bit pattern is a legal ring, so packing
and unpacking are inverse bijections between tiles and tail-biting state sequences.

Throughout the codec states are int32 tensors holding 0 .. 65535, and K is an int, or a float for half rates.
"""

from __future__ import annotations

import numbers
from functools import cache

import torch
from torch import Tensor

from exl3.codec.checks import need_tensors
from exl3.errors import ArgumentError, FormatError

TILE = 256
RATES: tuple[int | float, ...] = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)


def check_rate(K: int | float) -> int | float:
    """K itself if it is a rate of the format (whole rates as int); ArgumentError otherwise."""
    if isinstance(K, numbers.Real) and not isinstance(K, bool) and K in RATES:
        return int(K) if K == int(K) else float(K)
    raise ArgumentError(f"K = {K!r} is not a rate of EXL3; use one of {', '.join(map(str, RATES))}")


def rate_of_width(width: int) -> int | float:
    """K from the last dimension of a trellis, 16*K words (spec 1.5); FormatError where no rate has that width."""
    if isinstance(width, numbers.Real) and width / 16 in RATES:
        return check_rate(width / 16)
    known = ", ".join(str(int(16 * k)) for k in RATES)
    raise FormatError(f"trellis width {width} belongs to no EXL3 rate: expected 16*K, one of {known}. The tensor is damaged")


@cache
def fresh_bits(K: int | float, length: int = TILE) -> tuple[int, ...]:
    """D(i), the number of new bits at each position: K, or for half rates floor(K) and floor(K)+1 in turn (spec 2.2)."""
    K = check_rate(K)
    if isinstance(K, int):
        return (K,) * length
    return tuple(int(K) + (i & 1) for i in range(length))


def check_trellis(trellis: Tensor) -> int | float:
    """The rate of a trellis (in/16, out/16, 16*K) of int16 or uint16; FormatError where dtype or shape are wrong."""
    need_tensors(trellis=trellis)
    if trellis.dtype not in (torch.int16, torch.uint16):
        raise FormatError(f"trellis must be int16, got {trellis.dtype}; read the stored bit patterns without conversion")
    if trellis.dim() != 3:
        hint = "; a 2-D trellis is an embedding table, use embedding_decode" if trellis.dim() == 2 else ""
        raise FormatError(f"trellis must be (in/16, out/16, 16*K), got shape {tuple(trellis.shape)}{hint}")
    return rate_of_width(trellis.shape[2])


def as_states(states: Tensor) -> Tensor:
    """States of any integer dtype (int16 and uint16 as bit patterns) as int32 holding 0 .. 65535."""
    need_tensors(states=states)
    if states.dtype in (torch.int16, torch.uint16):
        return states.view(torch.int16).to(torch.int32) & 0xFFFF
    if states.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"states must be integers (int16, uint16, int32 or int64), got {states.dtype}")
    if states.numel() and (int(states.min()) < 0 or int(states.max()) > 0xFFFF):
        raise ArgumentError("states must lie in 0 .. 65535")
    return states.to(torch.int32)


def _period(K: int | float) -> tuple[int, int]:
    """(positions, 16-bit words) after which the layout of a ring repeats: 16 K bits, or 32 K for half rates."""
    positions = 16 if isinstance(K, int) else 32
    return positions, int(positions * K) // 16


def unpack(trellis: Tensor) -> Tensor:
    """States of a packed trellis (spec 2.2, 2.3).

    trellis: (in/16, out/16, 16*K) int16 -> (in/16, out/16, 256) int32 holding 0 .. 65535, in stream order.
    FormatError for a wrong dtype, shape or width.
    """
    K = check_trellis(trellis)
    positions, period_words = _period(K)
    rows, cols, width = trellis.shape
    # a big-endian stream of 16-bit words, once the halves of every 32-bit word are exchanged
    stream = trellis.view(torch.int16).reshape(-1, width // 2, 2).flip(-1).reshape(-1, width).to(torch.int32) & 0xFFFF
    pair = (stream.roll(1, dims=-1) << 16) | stream  # pair[a]: ring bits 16(a-1) .. 16(a+1)
    pair = pair.view(-1, width // period_words, period_words)
    states = torch.empty(pair.shape[0], pair.shape[1], positions, dtype=torch.int32, device=trellis.device)
    end = 0
    for i, new in enumerate(fresh_bits(K)[:positions]):
        end += new
        word = (end - 1) >> 4
        torch.bitwise_right_shift(pair[..., word], 16 * (word + 1) - end, out=states[..., i])
    return states.bitwise_and_(0xFFFF).view(rows, cols, TILE)


def pack(states: Tensor, K: int | float) -> Tensor:
    """Trellis of tail-biting states, the inverse of `unpack`; of each state only its D(i) new bits are stored (spec 2.3).

    states: (in/16, out/16, 256), any integer dtype -> (in/16, out/16, 16*K) int16.
    ArgumentError for a wrong K, dtype, shape or value.
    """
    K = check_rate(K)
    states = as_states(states)
    if states.dim() != 3 or states.shape[2] != TILE:
        raise ArgumentError(f"states must be (in/16, out/16, {TILE}), got shape {tuple(states.shape)}")
    positions, period_words = _period(K)
    rows, cols, _ = states.shape
    width = int(16 * K)
    states = states.reshape(-1, TILE // positions, positions)
    words = torch.zeros(states.shape[0], states.shape[1], period_words, dtype=torch.int32, device=states.device)
    end = 0
    for i, new in enumerate(fresh_bits(K)[:positions]):
        first = end >> 4
        end += new
        symbol = states[..., i] & ((1 << new) - 1)
        over = end - 16 * (first + 1)  # bits that fall into the next word
        if over <= 0:
            words[..., first] |= symbol << -over
        else:
            words[..., first] |= symbol >> over
            words[..., first + 1] |= (symbol << (16 - over)) & 0xFFFF
    return _to_int16(words).view(-1, width // 2, 2).flip(-1).reshape(rows, cols, width)


def is_tail_biting(states: Tensor, K: int | float) -> bool:
    """Whether every state begins with the end of its predecessor, the first one's predecessor being the last."""
    states = as_states(states)
    if not states.dim():
        raise ArgumentError("states must have a last dimension, the positions of a ring")
    new = torch.tensor(fresh_bits(K, states.shape[-1]), dtype=torch.int32, device=states.device)
    before = states.roll(1, dims=-1)
    return bool(((states >> new) == (before & ((1 << (16 - new)) - 1))).all())


def _to_int16(words: Tensor) -> Tensor:
    """0 .. 65535 as int16 bit patterns."""
    return (words - ((words & 0x8000) << 1)).to(torch.int16)
