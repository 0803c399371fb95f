"""flash-attn as an option: how it is called, and what is said where it is missing."""

import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch

from exl3 import ops
from exl3.cache import Batch, Cache
from exl3.ops import flash, reference

HEADS, KV, DIM = 4, 2, 32


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """flash_attn.flash_attn_varlen_func by its documentation, in torch."""
    assert causal and k.shape[1] % 256 == 0 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    out = torch.empty_like(q)
    for r in range(len(cu_seqlens_q) - 1):
        part = slice(int(cu_seqlens_q[r]), int(cu_seqlens_q[r + 1]))
        n, length = part.stop - part.start, int(cu_seqlens_k[r + 1] - cu_seqlens_k[r])
        assert n <= max_seqlen_q and length <= max_seqlen_k
        keys, values = (t[block_table[r].long()].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // t.shape[2], 1) for t in (k, v))
        s = torch.einsum("thd,phd->htp", q[part].float(), keys.float()) * softmax_scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        at = torch.arange(length - n, length)[:, None]
        seen = torch.arange(length)[None] <= at
        if window_size != (-1, -1):
            assert window_size[1] == 0
            seen &= torch.arange(length)[None] >= at - window_size[0]
        out[part] = torch.einsum("htp,phd->thd", s.masked_fill(~seen, -torch.inf).softmax(-1), values.float()).to(q.dtype)
    return out


@pytest.fixture
def fresh(monkeypatch):
    flash.function.cache_clear()
    monkeypatch.setenv("EXL3_PREFER_FA2", "1")
    yield monkeypatch
    flash.function.cache_clear()


@pytest.mark.parametrize("window,softcap", [(0, 0.0), (70, 0.0), (0, 20.0)])
def test_it_computes_the_attention_of_the_cache(fresh, window, softcap):
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = varlen
    fresh.setitem(sys.modules, "flash_attn", module)
    torch.manual_seed(0)
    config = {"num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM}
    layer = Cache(config, 2048).layers[0]
    pages = [[5, 2], [0], [3, 1]]
    for starts, counts in (([0, 0, 0], [250, 1, 300]), ([250, 1, 300], [90, 33, 7])):
        batch = Batch.packed([[1] * n for n in counts], starts, pages, SimpleNamespace(device=torch.device("cpu")))
        q, k, v = (torch.randn(sum(counts), n, DIM).half() for n in (HEADS, KV, KV))
        ops.cache_append(layer, k, v, batch)
        batch.runs = list(zip(starts, counts))
        got = flash.attention(flash.function(), q, layer, batch, 0.2, window, softcap)
        want = reference.attention(q.float(), layer, batch, scale=0.2, window=window, softcap=softcap)
        assert torch.allclose(got.float(), want, atol=3e-3)


def test_what_it_serves():
    q = torch.empty(1, 1, 64, dtype=torch.float16)
    layer = SimpleNamespace(k_bits=16, v_bits=16, head_dim=64)
    assert flash.serves(q, layer, None)
    for other in ({"k_bits": 4}, {"head_dim": 512}):
        assert not flash.serves(q, SimpleNamespace(**{**vars(layer), **other}), None)
    assert not flash.serves(q.bfloat16(), layer, None) and not flash.serves(q, layer, torch.zeros(1))


def test_a_missing_package_is_said_once(fresh):
    fresh.setitem(sys.modules, "flash_attn", None)
    with pytest.warns(RuntimeWarning, match="EXL3_PREFER_FA2 is set, but flash-attn can't be imported.*pip install flash-attn"):
        assert flash.function() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flash.function() is None
        fresh.delenv("EXL3_PREFER_FA2")
        flash.function.cache_clear()
        assert flash.function() is None
