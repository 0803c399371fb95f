"""exl3.ops through libexl3_rocm: the door, the start-up self-test, a recorded step and a whole model's decode, with CPU tensors in place
of a card's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from exl3 import codec, ops
from exl3.errors import BackendError

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("models", "ops")]

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


@pytest.mark.parametrize("pages", [2, 1], ids=["whole window", "slices"])
def test_prefill_through_a_stage(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm's prefill reads a quantized cache in the kernel, whatever the settings; the path of NVIDIA cards would give the same."""
    from ops_helpers import filled_layer, indices

    from exl3.ops import staging

    torch.manual_seed(0)
    layer, rows, _ = filled_layer(1, 64, [300], 4, 6)
    batch = indices([(260, 40)], rows)
    batch.runs = [(260, 40)]
    q = torch.randn(40, 2, 64).half()
    monkeypatch.setattr(staging, "plan", lambda: staging.Plan(1, pages, 20))
    assert staging.wanted(layer, batch, staging.plan())
    used: list[int] = []
    through = staging.attention
    monkeypatch.setattr(staging, "attention", lambda *args, **options: used.append(1) or through(*args, **options))
    direct = ops.attention(q, layer, batch, scale=0.125)
    assert not used
    monkeypatch.setattr(staging, "serves", lambda device: True)
    staged = ops.attention(q, layer, batch, scale=0.125)
    want = ops.reference.attention(q.float(), layer, batch, scale=0.125)
    assert used
    for y in (direct, staged):
        assert (y.float() - want).norm() < 2e-3 * want.norm()


def test_doctor_report() -> None:
    from exl3.cli.doctor import report

    lines = report()
    assert "rocm: mock card" in lines["backends"]["cpu"] and lines["self_test"]["cpu"] == "passed"


def test_doctor_on_a_card_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from exl3 import diagnose
    from exl3.cli.doctor import report

    here = replace(diagnose.facts(), torch_hip="6.4", card="amd", card_open=True, libraries=frozenset({"cpu", "rocm"}))
    monkeypatch.setattr(diagnose, "facts", lambda driver=False: here)
    said = "an AMD card is here and torch sees none"
    assert not any(said in x for x in report()["findings"])
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert sum(said in x for x in report()["findings"]) == 1


def test_model_decode_step(tmp_path: Path) -> None:
    """A tiny model of EXL3 matrices: prefill and one decode step through this library, against the plain torch operations."""
    from plain_llama import CONFIG, random_weights, write

    from exl3.cache import Batch, Cache
    from exl3.models import load
    from exl3.ops import native

    config = {**CONFIG, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    tensors = random_weights(config)
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        out, inp = tensors.pop(name).shape
        key = name.removesuffix(".weight")
        g = torch.Generator().manual_seed(len(key) * out + inp)
        tensors[f"{key}.trellis"] = torch.randint(-32768, 32768, (8 * -(-inp // 128), 8 * -(-out // 128), 64), generator=g).to(torch.int16)
        tensors[f"{key}.suh"] = (torch.randint(0, 2, (128 * -(-inp // 128),), generator=g) * 2.0 - 1).half()
        tensors[f"{key}.svh"] = torch.full((128 * -(-out // 128),), inp**-0.5).half()
        tensors[f"{key}.mul1"] = torch.tensor([-2082680531], dtype=torch.int32)
    write(tmp_path, config, tensors)
    ids = torch.randint(0, config["vocab_size"], (1, 6), generator=torch.Generator().manual_seed(1), dtype=torch.int32)

    def batch(cache: Cache, first: int, count: int) -> Batch:
        i32 = {"dtype": torch.int32}
        return Batch(
            ids=ids[0, first : first + count].contiguous(), positions=torch.arange(first, first + count, **i32),
            token_row=torch.zeros(count, **i32), row_start=torch.tensor([0, count], **i32),
            lengths=torch.tensor([first + count], **i32), block_table=torch.zeros(1, 1, **i32),
            logits_at=torch.tensor([count - 1], **i32), cache=cache,
        )  # fmt: skip

    def decode() -> torch.Tensor:
        model = load(tmp_path, device="cpu", max_tokens=256)
        cache = Cache(model, 256, model.device)
        with torch.no_grad():
            model(batch(cache, 0, 5))
            return model(batch(cache, 5, 1))[0].float()

    got = decode()
    here, native._backends["cpu"] = native._backends["cpu"], None  # reference.py serves
    want = decode()
    native._backends["cpu"] = here
    assert float((got - want).norm() / want.norm()) < 3e-3
