"""Prefill through a stage: the same numbers as without it, whatever fits the stage, and what decides between the two."""

from types import SimpleNamespace

import pytest
import torch
from ops_helpers import filled_layer, indices, rms_error

from exl3 import ops, settings
from exl3.errors import ArgumentError
from exl3.ops import staging
from exl3.ops.staging import Plan


def staged(runs, lengths, plan, heads=4, kv_heads=2, head_dim=64, bits=4, **options):
    """(staged, direct) results and the sizes of the pieces attention was asked for."""
    layer, pages, _ = filled_layer(kv_heads, head_dim, lengths, bits, bits)
    batch = indices(runs, pages)
    batch.runs = runs
    q = torch.randn(sum(n for _, n in runs), heads, head_dim)
    asked = []

    def attend(q, layer, batch):
        asked.append((len(q), layer.k_bits))
        return ops.attention(q, layer, batch, scale=0.2, **options)

    got = staging.attention(q, layer, batch, plan, attend, ops.cache_read, scale=0.2, **options)
    return got, ops.attention(q, layer, batch, scale=0.2, **options), asked


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 300}, {"window": 70, "softcap": 20.0}, {"sinks": torch.randn(4)}, {"softcap": 5.0}],
    ids=lambda o: "-".join(o),
)
@pytest.mark.parametrize("pages", [1, 2, 4])
def test_staged_equals_direct(options, pages):
    got, want, asked = staged([(500, 40), (0, 9), (255, 20)], [540, 9, 275], Plan(1, pages, 10), **options)
    assert rms_error(got, want.double()) < 1.5e-3  # fp16 in the stage
    assert (9, 4) in asked  # the short chunk reads the codes
    needs = 2 if options.get("window") == 70 else 3  # pages from the window's first on
    if pages >= needs:
        assert (40, 16) in asked
    elif options.get("window") or options.get("softcap"):
        assert (40, 4) in asked  # too wide, and not to be sliced
    else:
        assert not any(n == 40 for n, _ in asked)  # sliced


def test_mode_two_stages_everything():
    got, want, asked = staged([(500, 40), (0, 9)], [540, 9], Plan(2, 1, 10))
    assert asked == [(40, 16), (9, 16)] and rms_error(got, want.double()) < 1.5e-3


def test_wanted():
    quantized, plain = (SimpleNamespace(k_bits=b, v_bits=b) for b in (4, 16))
    long, short, recorded = (SimpleNamespace(runs=r) for r in ([(0, 3), (9, 256)], [(0, 255)], None))
    assert staging.wanted(quantized, long, Plan(1, 4, 256))
    assert not staging.wanted(quantized, short, Plan(1, 4, 256)) and staging.wanted(quantized, short, Plan(2, 4, 256))
    for mode in (1, 2):
        assert not staging.wanted(plain, long, Plan(mode, 4, 256)) and not staging.wanted(quantized, recorded, Plan(mode, 4, 256))
    assert not staging.wanted(quantized, long, Plan(0, 4, 256))


def test_nvidia_cards_alone(monkeypatch):
    """torch calls an AMD card cuda, too; tests/rocm shows that its kernels would do."""
    card, cpu = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(torch.version, "hip", None)
    assert staging.serves(card) and not staging.serves(cpu)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert not staging.serves(card) and not staging.serves(cpu)


def test_plan_is_the_settings(monkeypatch):
    assert staging.plan.__wrapped__() == Plan(1, 256, 256)
    monkeypatch.setenv("EXL3_QC_STAGING", "2")
    monkeypatch.setenv("EXL3_QC_STAGING_PAGES", "0")  # clamps to one page
    monkeypatch.setenv("EXL3_QC_PF_TWO_PASS_MIN_Q", "9")
    assert staging.plan.__wrapped__() == Plan(2, 1, 9)
    assert all(settings.TABLE[n].status == "works" for n in ("EXL3_QC_STAGING", "EXL3_QC_STAGING_PAGES", "EXL3_QC_PF_TWO_PASS_MIN_Q"))


def test_cache_read_into_given_tensors():
    layer, pages, _ = filled_layer(2, 64, [300], 4, 6)
    table = torch.tensor(pages[0], dtype=torch.int32)
    room = tuple(torch.full((400, 2, 64), float("nan"), dtype=torch.float16) for _ in range(2))
    got = ops.cache_read(layer, table, 10, 290, out=room)
    for a, b, whole in zip(got, ops.cache_read(layer, table, 10, 290), room):
        assert torch.equal(a, b) and a.data_ptr() == whole.data_ptr() and whole[290:].isnan().all()
    with pytest.raises(ArgumentError, match="no room"):
        ops.cache_read(layer, table, 0, 300, out=tuple(t[:299] for t in room))
