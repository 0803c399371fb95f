"""Ring-quantized table rows: token embeddings (spec 4.8) and hashed n-gram tables (spec 4.9).

A row is made of rings of 1 + dim*K/16 words: an fp16 scale, then a bit stream that, unlike a weight tile, is read from
the lowest bit up. dim is 256 for embeddings and 160 for n-gram rows; the codebook is always mul1, K a whole number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl3.codec.checks import need_tensors
from exl3.codec.codebooks import codebook_table
from exl3.codec.rings import as_states
from exl3.codec.rotation import rotate
from exl3.codec.search import encode_reference
from exl3.errors import ArgumentError, FormatError, NumericalError

EMBEDDING_DIM = 256
NGRAM_DIM = 160

# targets are brought to rms min(gamma / peak, high), at least 0.55, where peak = largest / rms: tails must fit the codebook
_PRESCALE = {1: (4.0, 1.16), 2: (3.6, 0.98), 3: (3.2, 0.98), 4: (3.0, 0.98), 5: (3.0, 0.95), 6: (3.0, 0.92), 7: (3.0, 0.90), 8: (3.0, 0.86)}


def unpack_rings(rings: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Rings (n, 1 + dim*K/16) int16 -> (states (n, dim) int32, scales (n,) fp16). FormatError for a wrong dtype or width."""
    K = _ring_rate(rings, dim)
    words = rings.view(torch.int16)
    scales = words[:, 0].contiguous().view(torch.float16)
    # 16 symbols fill K words; symbol r of a period starts at bit r*K
    stream = (words[:, 1:].to(torch.int32) & 0xFFFF).view(len(rings), dim // 16, K)
    symbols = torch.empty(len(rings), dim // 16, 16, dtype=torch.int32, device=rings.device)
    for r in range(16):
        word, bit = divmod(r * K, 16)
        symbol = stream[..., word] >> bit
        if bit + K > 16:
            symbol = symbol | (stream[..., word + 1] << (16 - bit))
        symbols[..., r] = symbol & ((1 << K) - 1)
    symbols = symbols.view(len(rings), dim)
    states = symbols.clone()
    for back in range(1, -(-16 // K)):
        states |= symbols.roll(back, dims=1) << (back * K)
    return states & 0xFFFF, scales


def pack_rings(states: Tensor, scales: Tensor, K: int) -> Tensor:
    """Inverse of `unpack_rings`: tail-biting states (n, dim), scales (n,) -> (n, 1 + dim*K/16) int16."""
    _check_ring_rate(K)
    states = as_states(states)
    need_tensors(scales=scales)
    if states.dim() != 2 or states.shape[1] % 16 or tuple(scales.shape) != (states.shape[0],):
        raise ArgumentError(f"states must be (n, 16*m) and scales (n,), got {tuple(states.shape)} and {tuple(scales.shape)}")
    n, dim = states.shape
    symbols = (states & ((1 << K) - 1)).reshape(n, dim // 16, 16)
    words = torch.zeros(*symbols.shape[:2], K, dtype=torch.int32, device=states.device)
    for r in range(16):
        word, bit = divmod(r * K, 16)
        words[..., word] |= (symbols[..., r] << bit) & 0xFFFF
        if bit + K > 16:
            words[..., word + 1] |= symbols[..., r] >> (16 - bit)
    words = (words - ((words & 0x8000) << 1)).to(torch.int16).view(n, dim * K // 16)
    return torch.cat([scales.half().view(torch.int16)[:, None], words], dim=1)


def embedding_decode(trellis: Tensor, signs: Tensor, hidden: int) -> Tensor:
    """Rows of a quantized token embedding.

    trellis: (rows, G*(1 + 16*K)) int16, any selection of rows; signs: (G, 256) fp16; hidden: true width, at most 256*G
    -> (rows, hidden) fp32. FormatError for wrong dtypes or shapes.
    """
    groups = _check_embedding(trellis, signs, hidden)
    rows, width = trellis.shape
    values = _ring_values(trellis.reshape(rows * groups, width // groups), EMBEDDING_DIM)
    values = rotate(values, EMBEDDING_DIM).view(rows, groups, EMBEDDING_DIM) * signs.float()
    return values.view(rows, groups * EMBEDDING_DIM)[:, :hidden]


def embedding_encode(rows: Tensor, K: int, signs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantizes embedding rows with the reference search: for tests and small tables.

    rows: (n, hidden) floating point; K: 1 .. 8; signs: (ceil(hidden/256), 256) of +1 and -1, None: drawn from a generator
    seeded with the padded width, so that shards agree -> (trellis (n, G*(1 + 16*K)) int16, signs fp16).
    """
    _check_ring_rate(K)
    need_tensors(rows=rows)
    if rows.dim() != 2 or not rows.dtype.is_floating_point or not rows.shape[1]:
        raise ArgumentError(f"rows must be (n, hidden) floating point, got {rows.dtype} of shape {tuple(rows.shape)}")
    n, hidden = rows.shape
    groups = -(-hidden // EMBEDDING_DIM)
    if signs is not None and tuple(signs.shape) != (groups, EMBEDDING_DIM):
        raise ArgumentError(f"signs must be ({groups}, {EMBEDDING_DIM}) for rows of {hidden}, got {tuple(signs.shape)}")
    if signs is None:
        generator = torch.Generator().manual_seed(groups * EMBEDDING_DIM)
        signs = (1 - 2 * torch.randint(0, 2, (groups, EMBEDDING_DIM), generator=generator)).half().to(rows.device)
    padded = torch.nn.functional.pad(rows.float(), (0, groups * EMBEDDING_DIM - hidden))
    targets = rotate(padded.view(n, groups, EMBEDDING_DIM) * signs.float(), EMBEDDING_DIM)
    return encode_rings(targets.view(n * groups, EMBEDDING_DIM), K).view(n, groups * (1 + 16 * K)), signs


def encode_rings(targets: Tensor, K: int) -> Tensor:
    """Rings (n, 1 + dim*K/16) int16 closest to the targets (n, dim): mul1, each with its least-squares fp16 scale.

    NumericalError for NaN, Inf, or rows so large that their scale leaves fp16.
    """
    states, values = encode_reference(prescale(targets, K), K, "mul1")
    scales = ((targets.double() * values).sum(dim=1) / values.double().square().sum(dim=1)).half()
    if not bool(torch.isfinite(scales).all()):
        bad = int((~torch.isfinite(scales)).nonzero()[0])
        raise NumericalError(f"ring {bad} needs a scale beyond fp16, its largest value is {float(targets[bad].abs().max()):.4g}")
    return pack_rings(states, scales, K)


def prescale(targets: Tensor, K: int) -> Tensor:
    """Rows of targets (n, dim), brought to the size that suits mul1 at rate K, in fp32: tails must fit the codebook. Zero stays zero."""
    gamma, high = _PRESCALE[_check_ring_rate(K)]
    targets = targets.double()  # squares of fp32 numbers may leave fp32
    rms = targets.square().mean(dim=1, keepdim=True).sqrt()
    peak = targets.abs().amax(dim=1, keepdim=True) / rms
    wanted = (gamma / peak).clamp(0.55, high)
    return torch.where(rms == 0, 0.0, targets * (wanted / rms)).float()


def ngram_decode(trellis: Tensor, rows: Tensor, head_bias: Tensor, head_offsets: Tensor) -> Tensor:
    """Rows of a hashed n-gram table.

    trellis: (n, 1 + 10*K) int16, the rings of the wanted rows; rows: (n,) their global row numbers; head_bias:
    (heads, 160) fp16; head_offsets: (heads,) int64, ascending -> (n, 160) fp32: value * scale + bias of the row's head.
    """
    need_tensors(trellis=trellis, rows=rows, head_bias=head_bias, head_offsets=head_offsets)
    fits = head_bias.dim() == 2 and head_bias.shape[1] == NGRAM_DIM and head_offsets.shape == head_bias.shape[:1]
    if not fits or rows.dim() != 1 or rows.shape != trellis.shape[:1]:
        raise FormatError(
            f"n-gram table: head_bias must be (heads, {NGRAM_DIM}), head_offsets (heads,), rows (n,); got {tuple(head_bias.shape)}, "
            f"{tuple(head_offsets.shape)}, {tuple(rows.shape)} for trellis {tuple(trellis.shape)}"
        )
    head = torch.searchsorted(head_offsets, rows.to(head_offsets.dtype), right=True) - 1
    if rows.numel() and int(head.min()) < 0:
        raise ArgumentError(f"n-gram row {int(rows.min())} lies before the first head's offset {int(head_offsets[0])}")
    return _ring_values(trellis, NGRAM_DIM) + head_bias.float()[head]


def ngram_rows(ids: Tensor, layer_multipliers: Tensor, head_vocab_sizes: Tensor, head_offsets: Tensor, eos: int) -> Tensor:
    """Global table rows of each position of one sequence.

    ids: (T,) tokens; layer_multipliers: (ngram_size,), head_vocab_sizes and head_offsets: (heads,) int64 -> (T, heads)
    int64. Heads are grouped by n-gram length 2 .. ngram_size. A token from before the start, or from behind an earlier
    end-of-sequence token, counts as `eos`.
    """
    tables = {"layer_multipliers": layer_multipliers, "head_vocab_sizes": head_vocab_sizes, "head_offsets": head_offsets}
    need_tensors(ids=ids, **tables)
    for name, table in {"ids": ids, **tables}.items():
        if table.dim() != 1 or table.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(f"{name} must be a vector of int64, got {table.dtype} of shape {tuple(table.shape)}")
    lengths = layer_multipliers.shape[0] - 1
    heads = head_offsets.shape[0]
    if lengths < 1 or heads % lengths or head_vocab_sizes.shape != head_offsets.shape:
        raise ArgumentError(f"{heads} heads cannot be shared out to n-gram lengths 2 .. {lengths + 1}")
    ids = ids.long()
    mix = ids * layer_multipliers[0]  # int64 products wrap around
    cut = torch.zeros_like(ids, dtype=torch.bool)
    rows = []
    for back in range(1, lengths + 1):
        earlier = torch.full_like(ids, eos)
        earlier[back:] = ids[: max(ids.shape[0] - back, 0)]
        cut = cut | (earlier == eos)
        mix = mix ^ (torch.where(cut, eos, earlier) * layer_multipliers[back])
        block = slice((back - 1) * heads // lengths, back * heads // lengths)
        rows.append(torch.remainder(mix[:, None], head_vocab_sizes[block]) + head_offsets[block])
    return torch.cat(rows, dim=1)


def embedding_rate(trellis: Tensor, signs: Tensor) -> int:
    """K of a quantized token embedding."""
    _check_embedding(trellis, signs, 1)
    return (trellis.shape[1] // signs.shape[0] - 1) // 16


def _ring_values(rings: Tensor, dim: int) -> Tensor:
    states, scales = unpack_rings(rings, dim)
    return codebook_table("mul1", device=rings.device)[states].float() * scales.float()[:, None]


def _check_ring_rate(K: int) -> int:
    if isinstance(K, bool) or not isinstance(K, int) or not 1 <= K <= 8:
        raise ArgumentError(f"K = {K!r} is not a rate of ring-quantized rows; use a whole number from 1 to 8")
    return K


def _ring_rate(rings: Tensor, dim: int) -> int:
    need_tensors(rings=rings)
    if rings.dtype not in (torch.int16, torch.uint16) or rings.dim() != 2:
        raise FormatError(f"rings must be a matrix of int16, got {rings.dtype} of shape {tuple(rings.shape)}")
    if dim < 16 or dim % 16:
        raise ArgumentError(f"rings have a multiple of 16 values, not {dim}")
    per_bit = dim // 16
    K, rest = divmod(rings.shape[1] - 1, per_bit)
    if rest or not 1 <= K <= 8:
        raise FormatError(f"rings of {rings.shape[1]} words are no rings of {dim} values: expected 1 + {per_bit}*K words, K from 1 to 8")
    return K


def _check_embedding(trellis: Tensor, signs: Tensor, hidden: int) -> int:
    need_tensors(trellis=trellis, signs=signs)
    if signs.dim() != 2 or signs.shape[1] != EMBEDDING_DIM or not signs.dtype.is_floating_point or not signs.shape[0]:
        raise FormatError(f"embedding signs must be (groups, {EMBEDDING_DIM}) float16, got {signs.dtype} of shape {tuple(signs.shape)}")
    groups = signs.shape[0]
    if trellis.dtype not in (torch.int16, torch.uint16) or trellis.dim() != 2 or trellis.shape[1] % groups:
        raise FormatError(
            f"embedding trellis must be int16 of shape (rows, {groups}*(1 + 16*K)) to fit signs {tuple(signs.shape)}, "
            f"got {trellis.dtype} of shape {tuple(trellis.shape)}"
        )
    if not 0 < hidden <= groups * EMBEDDING_DIM:
        raise ArgumentError(f"hidden = {hidden} does not fit {groups} groups of {EMBEDDING_DIM}")
    return groups
