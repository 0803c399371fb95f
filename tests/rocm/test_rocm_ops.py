"""exl3.ops through libexl3_rocm: the door, the start-up self-test, a recorded step and a whole model's decode, with CPU tensors in place
of a card's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl3 import codec, ops
from exl3.errors import BackendError

pytestmark = pytest.mark.usefixtures("as_cpu")


def weight(n_in: int, n_out: int, K: int = 4) -> ops.Weight:
    g = torch.Generator().manual_seed(n_in + n_out)
    trellis = torch.randint(-32768, 32768, (-(-n_in // 128) * 8, -(-n_out // 128) * 8, 16 * K), dtype=torch.int16, generator=g)
    suh, svh = torch.randn(trellis.shape[0] * 16, generator=g).half() / 16, torch.randn(trellis.shape[1] * 16, generator=g).half()
    return ops.Weight(trellis, suh, svh, None, n_in, n_out, "mul1")


def test_the_library_in_use() -> None:
    assert ops.backend("cpu").name == "rocm"


def test_linear() -> None:
    w = weight(200, 100)
    x = torch.randn(3, 200)
    want = x @ codec.dequantize(w.trellis, w.suh, w.svh, "mul1")[:200, :100]
    assert (ops.linear(x, w) - want).norm() < 1e-3 * want.norm()


def test_self_test() -> None:
    ops.self_test("cpu")


@pytest.mark.parametrize("op", ["reconstruct", "linear", "attention", "cache_append", "act_mul"])
def test_self_test_refuses_by_name(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that computes nothing, as on a card whose code is broken, is found."""
    monkeypatch.setitem(ops.backend("cpu").ops, op, lambda block, stream: None)
    with pytest.raises(BackendError, match="self-test on cpu"):
        ops.self_test("cpu")


def test_recorded_step() -> None:
    w = weight(128, 128)
    buffer = torch.zeros(2, 128)
    tape = ops.Tape("cpu")
    with torch.no_grad(), tape:
        recorded = ops.linear(ops.rms_norm(buffer, None, 1e-6), w)
    x = torch.randn(2, 128)
    buffer.copy_(x)
    tape.replay()
    assert torch.equal(recorded, ops.linear(ops.rms_norm(x, None, 1e-6), w))


def test_doctor_report() -> None:
    from exl3.cli.doctor import report

    lines = report()
    assert "rocm: mock card" in lines["backends"]["cpu"] and lines["self_test"]["cpu"] == "passed"


def test_model_decode_step() -> None:
    """A tiny model's prefill and one decode step, against the plain torch operations."""
    from exl3.cache import Batch, Cache
    from exl3.models import load

    model = load(Path(__file__).resolve().parents[1] / "data" / "models" / "llama_llama3", device="cpu", max_tokens=256)
    ids = torch.randint(0, model.vocab_size, (1, 6), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    want = model.forward_whole(ids)[0, -1].float()
    cache = Cache(model, 256, model.device)

    def batch(first: int, count: int) -> Batch:
        i32 = {"dtype": torch.int32}
        return Batch(
            ids=ids[0, first : first + count].contiguous(), positions=torch.arange(first, first + count, **i32), token_row=torch.zeros(count, **i32),
            row_start=torch.tensor([0, count], **i32), lengths=torch.tensor([first + count], **i32), block_table=torch.zeros(1, 1, **i32),
            logits_at=torch.tensor([count - 1], **i32), cache=cache, tables={},
        )  # fmt: skip

    with torch.no_grad():
        model(batch(0, 5))
        got = model(batch(5, 1))[0].float()
    assert (got - want).norm() < 1e-3 * want.norm()
