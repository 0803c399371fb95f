"""Cache, Layer and Batch: shapes, bytes, pages, and errors that say what to do."""

from types import SimpleNamespace

import pytest
import torch

from exl3.cache import Batch, Cache
from exl3.errors import ArgumentError

CONFIG = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 384}


def test_shapes_and_bytes():
    cache = Cache(CONFIG, 300, k_bits=16, v_bits=4)
    assert cache.pages == 2 and cache.max_tokens == 512 and len(cache.layers) == 3
    layer = cache.layers[0]
    assert layer.k.shape == (2, 256, 2, 64) and layer.k.dtype == torch.float16 and layer.k_scale is None
    assert layer.v.shape == (2, 256, 4 * 4) and layer.v.dtype == torch.int32
    assert layer.v_scale.shape == (2, 256, 4) and layer.v_scale.dtype == torch.float16
    per_token = 2 * 2 * 64 + 2 * 64 * 4 // 8 + 4 * 2
    assert cache.bytes == 3 * 512 * per_token == 3 * 512 * Cache.bytes_per_token(2, 64, 16, 4)


def test_layers_of_different_shapes_and_objects_as_config():
    cache = Cache(SimpleNamespace(cache_shapes=[(1, 256), (4, 64)]), 1)
    assert [tuple(layer.k.shape[2:]) for layer in cache.layers] == [(1, 256), (4, 64)]


def test_append_and_attend_through_the_layer():
    cache = Cache(CONFIG, 600)
    batch = Batch.packed([[5, 6, 7], [8]], [254, 0], [[2, 0], [1]], cache)
    assert batch.positions.tolist() == [254, 255, 256, 0] and batch.token_row.tolist() == [0, 0, 0, 1]
    assert batch.row_start.tolist() == [0, 3, 4] and batch.lengths.tolist() == [257, 1] and batch.logits_at.tolist() == [2, 3]
    assert (batch.tokens, batch.rows) == (4, 2)
    k, v = torch.randn(4, 2, 64), torch.randn(4, 2, 64)
    cache.layers[1].append(k, v, batch)
    assert torch.equal(cache.layers[1].k[0, 0], k[2].half()) and torch.equal(cache.layers[1].k[2, 255], k[1].half())
    y = cache.layers[1].attend(torch.randn(4, 6, 64), batch, scale=0.125)
    assert torch.allclose(y[3].view(2, 3, 64), v[3].half().float()[:, None].expand(2, 3, 64), atol=1e-6)  # one position: its value


def test_copy_page_copies_every_tensor():
    cache = Cache(CONFIG, 1024, k_bits=3, v_bits=16)
    for layer in cache.layers:
        for t in layer.tensors:
            t.copy_(torch.randint(0, 100, t.shape))
    cache.copy_page(1, 3)
    for layer in cache.layers:
        for t in layer.tensors:
            assert torch.equal(t[3], t[1]) and not torch.equal(t[2], t[1])


def test_whole_sequences():
    batch = Batch.whole(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 6] and batch.positions.tolist() == [0, 1, 2] * 2
    assert batch.row_start.tolist() == [0, 3, 6] and batch.cache is None and batch.block_table is None
    assert all(t.dtype == torch.int32 for t in (batch.ids, batch.positions, batch.token_row, batch.row_start, batch.lengths))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"k_bits": 9}, "k_bits"),
        ({"v_bits": 1}, "v_bits"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"compand": 1.5}, "compand"),
        ({"config": {"num_hidden_layers": 2}}, "head_dim"),
        ({"config": {"cache_shapes": [(1, 60)]}}, "multiples of 8"),
        ({"config": {"cache_shapes": [(1, 72)]}, "k_bits": 4}, "multiples of 32"),
        ({"config": {"cache_shapes": [(1, 640)]}}, "512"),
        ({"max_tokens": "256"}, "max_tokens"),
        ({"max_tokens": 256.5}, "max_tokens"),
        ({"k_bits": "8"}, "k_bits"),
        ({"v_bits": 3.5}, "v_bits"),
    ],
)
def test_bad_arguments_are_named(change, word):
    arguments = {"config": CONFIG, "max_tokens": 256, **change}
    with pytest.raises(ArgumentError, match=word):
        Cache(**arguments)


def test_bad_pages_and_rows():
    cache = Cache(CONFIG, 256)
    with pytest.raises(ArgumentError, match="page 1"):
        cache.copy_page(0, 1)
    with pytest.raises(ArgumentError, match="row 0"):
        Batch.packed([[1, 2]], [255], [[0]], cache)
    with pytest.raises(ArgumentError, match="ids"):
        Batch.whole(torch.zeros(0, 3, dtype=torch.int32))
