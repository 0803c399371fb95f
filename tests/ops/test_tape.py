"""Recorded steps: a replay with other contents equals the eager step bit for bit, and nothing of torch slips in unseen."""

import gc
import threading

import pytest
import torch
from ops_helpers import filled_layer, indices

from exl3 import ops
from exl3.errors import ArgumentError, BackendError


def weight(n_in, n_out, k=4, codebook="mul1", bias=False):
    shape = (-(-n_in // 128) * 8, -(-n_out // 128) * 8, 16 * k)
    return ops.Weight(
        torch.randint(-32768, 32768, shape, dtype=torch.int16), torch.randn(16 * shape[0]).half(), torch.randn(16 * shape[1]).half(),
        torch.randn(n_out) if bias else None, n_in, n_out, codebook,
    )  # fmt: skip


class Toy:
    """One transformer block and a head, built from every operation a decode step uses."""

    heads, kv_heads, head_dim, hidden, inner, vocab = 4, 2, 64, 200, 300, 500

    def __init__(self, bits=16):
        self.qkv = tuple(weight(self.hidden, n * self.head_dim) for n in (self.heads, self.kv_heads, self.kv_heads))
        self.o, self.gate, self.up = (
            weight(self.heads * self.head_dim, self.hidden),
            weight(self.hidden, self.inner),
            weight(self.hidden, self.inner),
        )
        self.down, self.head = weight(self.inner, self.hidden, bias=True), weight(self.hidden, self.vocab, 6)
        self.table, self.norm = torch.randn(self.vocab, self.hidden), torch.rand(self.hidden) + 0.5
        self.inv_freq = 1e4 ** -(torch.arange(32) / 32.0)
        self.layer, self.pages, _ = filled_layer(self.kv_heads, self.head_dim, [300, 20], bits, bits)
        self.dense = torch.randn(self.hidden, self.hidden) / 14

    def __call__(self, batch):
        x = ops.embedding(batch.ids, self.table)
        q, k, v = ops.linear(x, self.qkv, norm=self.norm, eps=1e-5)
        q, k, v = (t.view(len(x), -1, self.head_dim) for t in (q, k, v))
        cos, sin = ops.rotary_table(batch.positions, self.inv_freq)
        ops.rotary_(q, k, cos, sin, 64)
        self.layer.append(k, v, batch)
        y = self.layer.attend(q, batch, scale=0.125)
        ops.linear(y.view(len(x), -1), self.o, out=x, accumulate=True)
        h = ops.rms_norm(x, self.norm, 1e-5)
        h = ops.linear(h, (self.gate, self.up), activation="silu")
        ops.add_(x, ops.linear(h, self.down))
        x = ops.dense(x, self.dense)
        logits = ops.linear(ops.take_rows(x, batch.logits_at), self.head)
        ops.softcap_(logits, 1.0, 30.0)
        return ops.sample(logits, batch.params)[0], logits


def step(toy, places, seed):
    torch.manual_seed(seed)
    batch = indices([(p, 1) for p in places], toy.pages)
    batch.ids = torch.randint(0, toy.vocab, (len(places),), dtype=torch.int32)
    batch.logits_at = torch.arange(len(places), dtype=torch.int32)
    batch.params = ops.pack_sample_params([ops.SampleParams(temperature=0.8, top_p=0.9, seed=seed, counter=p) for p in places])
    return batch


@pytest.mark.parametrize("bits", [16, 4])
def test_a_replay_with_other_contents_equals_the_eager_step(bits):
    toy = Toy(bits)
    cache = [t.clone() for t in toy.layer.tensors]

    def restore():
        for t, saved in zip(toy.layer.tensors, cache):
            t.copy_(saved)

    buffers = step(toy, [0, 0], 1)
    tape = ops.Tape()
    with torch.no_grad(), tape:
        ids, logits = toy(buffers)
    assert len(tape) == 16 and tape.nbytes > 0
    for seed, places in ((2, [299, 19]), (3, [255, 3]), (4, [256, 0])):
        batch = step(toy, places, seed)
        restore()
        with torch.no_grad():
            want_ids, want_logits = toy(batch)
        after = [t.clone() for t in toy.layer.tensors]
        restore()
        for name in ("ids", "positions", "token_row", "block_table", "logits_at", "params"):
            getattr(buffers, name).copy_(getattr(batch, name))
        gc.collect()
        for threads in (None, 1, 2):
            restore()
            ids.fill_(-7)
            tape.replay(threads)
            assert torch.equal(ids, want_ids) and torch.equal(logits, want_logits)
            assert all(torch.equal(t, a) for t, a in zip(toy.layer.tensors, after))


def test_recording_runs_the_step_too():
    x = torch.randn(2, 64)
    want = ops.rms_norm(x, None, 1e-5)
    with ops.Tape():
        got = ops.rms_norm(x, None, 1e-5)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: x + 1, "add"),
        (lambda x: torch.nn.functional.silu(x), "silu"),
        (lambda x: x.clone(), "clone"),
        (lambda x: x[:, ::2].contiguous(), "clone"),
        (lambda x: torch.zeros(3), "zeros"),
        (lambda x: x.index_select(0, torch.tensor([0])), "tensor|index_select|lift"),
        (lambda x: float(x.sum()), "sum"),
        (lambda x: x.half(), "_to_copy"),
    ],
)
def test_torch_computations_are_refused_by_name(call, name):
    x = torch.randn(4, 64)
    with pytest.raises(ArgumentError, match=name), ops.Tape():
        call(ops.rms_norm(x, None, 1e-5))
    # the thread is left clean: the next tape records
    tape = ops.Tape()
    with tape:
        ops.rms_norm(x, None, 1e-5)
    assert len(tape) == 1


def test_views_and_empty_are_allowed():
    x = torch.randn(4, 64)
    with ops.Tape():
        y = ops.rms_norm(x, None, 1e-5)
        y.view(2, 128), y[1:3], y[:, :32], y.split(16, dim=1), y.unsqueeze(0), y.t(), y.flatten(), y.unflatten(1, (4, 16)), y.chunk(2)
        torch.empty(3), torch.empty_like(y), y.new_empty(2)


def test_reference_fallbacks_are_refused():
    # an operation that would run in torch (here: for a gradient) may not be part of a recorded step
    x = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(ArgumentError, match="torch computation"), ops.Tape():
        ops.rms_norm(x, None, 1e-5)


def test_a_failed_recording_is_no_step():
    tape = ops.Tape()
    with pytest.raises(ValueError), tape:
        ops.rms_norm(torch.randn(2, 8), None, 1e-5)
        raise ValueError
    with pytest.raises(BackendError, match="no step"):
        tape.replay()


def test_tapes_do_not_nest_and_record_once():
    x, tape = torch.randn(2, 8), ops.Tape()
    with tape:
        with pytest.raises(ArgumentError, match="another tape"), ops.Tape():
            pass
        ops.rms_norm(x, None, 1e-5)
    with pytest.raises(ArgumentError, match="once"), tape:
        pass


def test_other_threads_are_not_recorded():
    x, seen = torch.randn(2, 8), []
    tape = ops.Tape()
    with tape:
        other = threading.Thread(target=lambda: seen.append(ops.rms_norm(x, None, 1e-5) + 1))
        other.start()
        other.join()
    assert len(tape) == 0 and len(seen) == 1


def test_everything_involved_stays_alive():
    x = torch.randn(3, 200)
    tape = ops.Tape()

    def record():
        pair = (weight(200, 100), weight(200, 50))
        norms = (torch.rand(200), torch.rand(200))
        with tape:
            h = ops.rms_norm(x, norms[0], 1e-5)
            return ops.linear(h, pair, norm=norms[1], eps=1e-6)[0]

    y = record()
    want = y.clone()
    gc.collect()
    junk = [torch.full((200,), float("nan")) for _ in range(50)] + [torch.full((3, 200), float("nan")) for _ in range(50)]
    tape.replay()
    assert torch.equal(y, want) and len(junk) == 100


def test_the_workspace_may_grow_after_recording():
    layer, pages, _ = filled_layer(1, 64, [600])
    q = torch.randn(1, 8, 64)
    batch = indices([(599, 1)], pages)
    tape = ops.Tape()
    with tape:
        y = ops.attention(q, layer, batch, scale=0.125)
    want = y.clone()
    big, big_pages, _ = filled_layer(1, 512, [3000])
    torch.set_num_threads(2)
    ops.attention(torch.randn(1, 64, 512), big, indices([(2999, 1)], big_pages), scale=0.1)
    y.zero_()
    tape.replay(2)
    torch.set_num_threads(1)
    assert torch.equal(y, want)
