"""The paged cache and attention over it: codes bit-exact with the codec, attention against an fp64 softmax over the stored values."""

import math

import pytest
import torch
from ops_helpers import filled_layer, indices, poisoned, rms_error

from exl3 import codec, ops
from exl3.cache import Layer
from exl3.errors import ArgumentError

BITS = [(16, 16), (8, 8), (4, 4), (2, 3), (5, 7), (6, 16), (16, 2)]


def softmax_attention(q, k, v, positions, *, scale, window=0, softcap=0.0, sinks=None):
    """q (T, heads, D), k and v (S, kv_heads, D) of one row, fp64, straight from the formula."""
    groups = q.shape[1] // k.shape[1]
    y = torch.empty(q.shape, dtype=torch.float64)
    for t, p in enumerate(positions):
        first = max(0, p - window + 1) if window else 0
        for h in range(q.shape[1]):
            kh, vh = k[first : p + 1, h // groups].double(), v[first : p + 1, h // groups].double()
            s = (kh @ q[t, h].double()) * scale
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            top = max(float(s.max()), float(sinks[h]) if sinks is not None else -math.inf)
            e = (s - top).exp()
            total = e.sum() + (math.exp(float(sinks[h]) - top) if sinks is not None else 0)
            y[t, h] = (e[:, None] * vh).sum(0) / total
    return y


def stored(layer, pages, n):
    return ops.reference.cache_read(layer, torch.tensor(pages, dtype=torch.int32), 0, n, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("k_bits", "v_bits"), [(16, 16), *((b, 10 - b) for b in range(2, 9))])
@pytest.mark.parametrize("compand", [0.0, 0.65])
def test_append_writes_the_codecs_codes(dtype, k_bits, v_bits, compand):
    head_dim, kv_heads = 96, 3
    layers = [Layer(4, kv_heads, head_dim, torch.device("cpu"), k_bits, v_bits, compand) for _ in range(2)]
    for t in layers[0].tensors:
        t.view(torch.uint8).fill_(0xA5)
    before = [t.clone() for t in layers[0].tensors]
    batch = indices([(250, 9), (0, 1)], [[2, 0], [3]], padding=2)
    k, v = ((torch.randn(12, kv_heads, head_dim) * 10 ** torch.empty(12, 1, 1).uniform_(-3, 2)).to(dtype) for _ in range(2))
    k[3], v[4, 0] = 0, 0
    ops.cache_append(layers[0], k, v, batch)
    places = [(2, 250 + i) for i in range(6)] + [(0, i) for i in range(3)] + [(3, 0)]
    for x, bits, data, scales in ((k, k_bits, layers[0].k, layers[0].k_scale), (v, v_bits, layers[0].v, layers[0].v_scale)):
        for t, (page, place) in enumerate(places):
            if bits == 16:
                assert torch.equal(data[page, place], x[t].half())
                data[page, place].view(torch.uint8).fill_(0xA5)
            else:
                codes, scale = codec.kv_quantize(x[t].half().flatten(), bits, compand)
                assert torch.equal(data[page, place], codes) and torch.equal(scales[page, place].view(torch.int16), scale.view(torch.int16))
                data[page, place].view(torch.uint8).fill_(0xA5)
                scales[page, place].view(torch.uint8).fill_(0xA5)
    for got, was in zip(layers[0].tensors, before):  # nothing else was touched
        assert torch.equal(got.view(torch.uint8), was.view(torch.uint8))


def test_known_codes_of_the_format():
    # format section 5: x[j] = j - 15.5
    x = (torch.arange(32) - 15.5).view(1, 1, 32)
    for bits, words in ((3, [0xAAA9A996, 0xAAAAAAA8, 0x00000016]), (4, [0x88868778, 0x88888884, 0x88888880, 0x88888888])):
        layer = Layer(1, 1, 32, torch.device("cpu"), bits, bits)
        ops.cache_append(layer, x, x, indices([(0, 1)], [[0]]))
        assert [w & 0xFFFFFFFF for w in layer.k[0, 0].tolist()] == words
        assert layer.v_scale[0, 0].view(torch.int16).item() == 0x51A8


@pytest.mark.parametrize(("k_bits", "v_bits"), BITS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_read_decodes_as_the_codec_does(k_bits, v_bits, dtype):
    layer, pages, _ = filled_layer(2, 64, [600], k_bits, v_bits, compand=0.65)
    table = torch.tensor(pages[0], dtype=torch.int32)
    for start, count in ((0, 600), (250, 12), (511, 2), (5, 0)):
        k, v = ops.cache_read(layer, table, start, count, dtype)
        want_k, want_v = ops.reference.cache_read(layer, table, start, count, dtype)
        # fp16 roundings of the decoded sums may fall differently by one unit
        assert torch.allclose(k, want_k, rtol=1.5e-3, atol=1e-4) and torch.allclose(v, want_v, rtol=1.5e-3, atol=1e-4)
        if count:
            assert (k == want_k).float().mean() > 0.99


@pytest.mark.parametrize(("k_bits", "v_bits"), BITS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 128), (40, 2, 32), (2, 1, 256), (1, 1, 512)])
def test_decode_attention(k_bits, v_bits, heads, kv_heads, head_dim):
    lengths = [1, 255, 257, 700]
    layer, pages, _ = filled_layer(kv_heads, head_dim, lengths, k_bits, v_bits)
    q = torch.randn(5, heads, head_dim)
    batch = indices([(n - 1, 1) for n in lengths], pages, padding=1)
    y = ops.attention(q, layer, batch, scale=head_dim**-0.5)
    for r, n in enumerate(lengths):
        want = softmax_attention(q[r : r + 1], *stored(layer, pages[r], n), [n - 1], scale=head_dim**-0.5)
        # decoded values are rounded to fp16 by the codec, not inside the kernel
        assert rms_error(y[r : r + 1], want) < (1e-6 if k_bits == v_bits == 16 else 1e-3)
    assert (y[4] == 0).all()


@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 96, 112, 192, 320, 512])
def test_any_head_dim(head_dim):
    layer, pages, _ = filled_layer(1, head_dim, [300])
    q = torch.randn(7, 2, head_dim)
    for rows in ([(299, 1)], [(293, 7)]):
        n = rows[0][1]
        y = ops.attention(q[:n], layer, indices(rows, pages), scale=0.1)
        positions = range(rows[0][0], 300)
        assert rms_error(y, softmax_attention(q[:n], *stored(layer, pages[0], 300), positions, scale=0.1)) < 3e-6


@pytest.mark.parametrize(("k_bits", "v_bits"), [(16, 16), (4, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 1},
        {"window": 130},
        {"window": 256},
        {"softcap": 5.0},
        {"sinks": True},
        {"window": 70, "softcap": 20.0, "sinks": True},
    ],
)
def test_prefill_and_decode_with_all_options(k_bits, v_bits, dtype, options):
    options = dict(options)
    heads, kv_heads, head_dim = 6, 2, 64
    if options.get("sinks"):
        options["sinks"] = torch.randn(heads)
    lengths = [530, 3, 64]
    layer, pages, _ = filled_layer(kv_heads, head_dim, lengths, k_bits, v_bits)
    runs = [(400, 130), (2, 1), (0, 64)]
    q = torch.randn(sum(n for _, n in runs), heads, head_dim).to(dtype)
    y = ops.attention(q, layer, indices(runs, pages), scale=0.3, **options)
    at = 0
    for r, (start, n) in enumerate(runs):
        picked = sorted({0, n - 1, n // 2, n // 3})
        k, v = stored(layer, pages[r], start + n)
        want = softmax_attention(q[[at + i for i in picked]], k, v, [start + i for i in picked], scale=0.3, **options)
        tolerance = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}[dtype]
        assert rms_error(y[[at + i for i in picked]], want) < tolerance + (0 if k_bits == 16 else 1e-3)
        at += n


@pytest.mark.parametrize("compand", [0.3, 0.65])
def test_compander_in_attention(compand):
    layer, pages, _ = filled_layer(2, 64, [300], 3, 4, compand)
    for rows in ([(299, 1)], [(260, 40)]):
        q = torch.randn(rows[0][1], 2, 64)
        y = ops.attention(q, layer, indices(rows, pages), scale=0.125)
        want = softmax_attention(q[-1:], *stored(layer, pages[0], 300), [299], scale=0.125)
        assert rms_error(y[-1:], want) < 1e-3


def test_a_row_does_not_depend_on_its_neighbours_or_threads():
    lengths = [513, 30, 256, 2]
    layer, pages, _ = filled_layer(2, 64, lengths, 16, 4)
    runs = [(512, 1), (10, 20), (252, 4), (1, 1)]
    q = torch.randn(26, 8, 64)
    whole = ops.attention(q, layer, indices(runs, pages), scale=0.125)
    at = 0
    for (start, n), p in zip(runs, pages):
        for threads in (1, 2, 3):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            alone = ops.attention(q[at : at + n], layer, indices([(start, n)], [p]), scale=0.125)
            torch.set_num_threads(before)
            assert torch.equal(alone, whole[at : at + n])
        at += n


def test_stale_values_behind_the_row_are_not_read():
    layer, pages, _ = filled_layer(1, 64, [300])
    layer.k[pages[0][1], 44:] = float("nan")
    layer.v[pages[0][1], 44:] = float("nan")
    for runs in ([(299, 1)], [(290, 10)]):
        y = ops.attention(torch.randn(runs[0][1], 3, 64), layer, indices(runs, pages), scale=0.125)
        assert not y.isnan().any()


def test_nan_in_one_row_stays_there():
    layer, pages, _ = filled_layer(1, 64, [20, 20])
    layer.v[pages[0][0], 5, 0, 3] = float("nan")
    y = ops.attention(torch.randn(2, 2, 64), layer, indices([(19, 1), (19, 1)], pages), scale=0.125)
    assert y[0, :, 3].isnan().all() and not y[1].isnan().any()


def test_large_scores_do_not_overflow():
    layer, pages, _ = filled_layer(1, 64, [500])
    q = torch.randn(1, 1, 64) * 1e4
    want = softmax_attention(q, *stored(layer, pages[0], 500), [499], scale=1.0)
    assert rms_error(ops.attention(q, layer, indices([(499, 1)], pages), scale=1.0), want) < 1e-5


def test_strided_query():
    layer, pages, _ = filled_layer(2, 64, [50])
    qkv = torch.randn(1, 512)
    q = qkv[:, :256].view(1, 4, 64)
    y = ops.attention(q, layer, indices([(49, 1)], pages), scale=0.125)
    assert torch.equal(y, ops.attention(q.contiguous(), layer, indices([(49, 1)], pages), scale=0.125))


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 3.0}, {"sinks": True}, {"causal": False}])
@pytest.mark.parametrize("sizes", [[12, 12], [3, 17, 1]])
def test_sdpa_whole_sequences(options, sizes):
    options = dict(options)
    causal = options.pop("causal", True)
    if options.get("sinks"):
        options["sinks"] = torch.randn(4)
    q, k, v = torch.randn(sum(sizes), 4, 16), torch.randn(sum(sizes), 2, 16), torch.randn(sum(sizes), 2, 16)
    row_start = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
    y = ops.sdpa(q, k, v, row_start, scale=0.25, causal=causal, **options)
    for a, b in zip(row_start.tolist(), row_start.tolist()[1:]):
        positions = range(b - a) if causal else [b - a - 1] * (b - a)
        assert rms_error(y[a:b], softmax_attention(q[a:b], k[a:b], v[a:b], positions, scale=0.25, **options)) < 1e-5


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q": torch.randn(1, 3, 64)}, "does not fit"),
        ({"q": torch.randn(1, 4, 32)}, "does not fit"),
        ({"q": torch.randn(1, 4, 64).double()}, "q"),
        ({"q": torch.randn(1, 64)}, "q"),
        ({"sinks": torch.randn(3)}, "sinks"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "positions"),
        ({"positions": torch.zeros(1, dtype=torch.int64)}, "positions"),
        ({"block_table": None}, "block_table"),
    ],
)
def test_bad_arguments_are_named(change, word):
    layer, pages, _ = filled_layer(2, 64, [3])
    batch = indices([(2, 1)], pages)
    q, sinks = change.pop("q", torch.randn(1, 4, 64)), change.pop("sinks", None)
    for name, value in change.items():
        setattr(batch, name, value)
    with pytest.raises(ArgumentError, match=word):
        ops.attention(q, layer, batch, scale=1.0, sinks=sinks)


def test_places_outside_the_table_are_not_written():
    layer = Layer(2, 1, 64, torch.device("cpu"))
    batch = indices([(0, 1), (256, 1), (0, 1)], [[1], [1], [7]])
    ops.cache_append(layer, torch.ones(3, 1, 64), torch.ones(3, 1, 64), batch)
    assert float(layer.k.sum()) == 64 and float(layer.k[1, 0].sum()) == 64


def test_poisoned_output_is_overwritten_everywhere():
    # the result is made inside; a fresh allocation may hold anything, so run over a dirty allocator
    for _ in range(8):
        poisoned((5, 4, 64))
    layer, pages, _ = filled_layer(2, 64, [40])
    assert not ops.attention(torch.randn(5, 4, 64), layer, indices([(36, 4)], pages, padding=1), scale=0.1).isnan().any()


@pytest.mark.parametrize("native_op", [True, False])
@pytest.mark.parametrize(("k_bits", "v_bits"), [(16, 16), (4, 6)])
@pytest.mark.parametrize(
    ("rotary_dim", "interleaved", "norms"), [(64, False, True), (32, True, False), (0, False, True), (0, False, False)]
)
def test_attend_is_rotary_append_and_attention(monkeypatch, native_op, k_bits, v_bits, rotary_dim, interleaved, norms):
    if not native_op:
        monkeypatch.delitem(ops.backend("cpu").ops, "attend")
    lengths = [300, 9]
    batch = indices([(298, 2), (0, 9)], [[0, 1], [2]], padding=1)
    tokens = 12
    q, k, v = torch.randn(tokens, 4, 64), torch.randn(tokens, 2, 64), torch.randn(tokens, 2, 64)
    cos, sin = (torch.randn(tokens, rotary_dim // 2) for _ in range(2)) if rotary_dim else (None, None)
    more = {"interleaved": interleaved}
    if norms:
        more |= {"q_norm": torch.rand(64) + 0.5, "k_norm": torch.rand(64) + 0.5, "eps": 1e-5}
    options = {"scale": 0.1, "window": 200, "softcap": 9.0, "sinks": torch.randn(4)}
    torch.manual_seed(3)
    layers = [filled_layer(2, 64, lengths, k_bits, v_bits)[0] for _ in range(2)]
    for a, b in zip(layers[0].tensors, layers[1].tensors):
        b.copy_(a)
    got = ops.attend(q.clone(), k.clone(), v, layers[0], batch, cos, sin, rotary_dim, **more, **options)
    if rotary_dim or norms:
        ops.rotary_(q, k, cos, sin, rotary_dim, **more)
    ops.cache_append(layers[1], k, v, batch)
    assert torch.equal(got, ops.attention(q, layers[1], batch, **options))
    assert all(torch.equal(a, b) for a, b in zip(layers[0].tensors, layers[1].tensors))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"cos": None}, "cos and sin"), ({"rotary_dim": 65}, "rotary_dim 65"), ({"q_norm": torch.ones(63)}, "q_norm"),
        ({"k": torch.zeros(2, 2, 32)}, "k and v"), ({"q": torch.zeros(2, 3, 64)}, "does not fit"),
        ({"v": torch.zeros(2, 2, 64).half()}, "v"),
    ],
    ids=str,
)  # fmt: skip
def test_attend_names_what_is_wrong(change, named):
    layer, pages, _ = filled_layer(2, 64, [9])
    table = torch.zeros(2, 32)
    q, k, v = (torch.zeros(2, n, 64) for n in (4, 2, 2))
    given = {"q": q, "k": k, "v": v, "cos": table, "sin": table, "rotary_dim": 64, **change}
    with pytest.raises(ArgumentError, match=named):
        ops.attend(layer=layer, batch=indices([(0, 2)], pages), scale=0.1, **given)
