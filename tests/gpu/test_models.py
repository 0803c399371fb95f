"""Whole models: a card's logits against the CPU's, every family at 4 bits, whole sequences and through the cache.

EXL3_TEST_MODEL names an EXL3 directory that is judged too, on held-out text if it has a tokenizer; EXL3_TEST_REPORT a file to which all
measured values are added.
"""

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import exl3
from exl3 import ops
from exl3.cache import Cache
from exl3.errors import BackendError
from exl3.generate.step import StepRunner, forward, packed_batch

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "models"))
from synthetic_models import FAMILIES, ids, make  # noqa: E402

PROMPT, TOKENS = 150, 190  # the last 40 as decode steps


@pytest.fixture(scope="module", autouse=True)
def card():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for device in ("cuda", "cpu"):
        try:
            ops.backend(device)
        except BackendError as error:
            pytest.skip(str(error))


def load(path, device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exl3.load(path, device=device, max_tokens=2048)


def kl(p, q):
    """Mean over positions, in float64."""
    p, q = (torch.log_softmax(x.cpu().double(), -1) for x in (p, q))
    return float((p.exp() * (p - q)).sum(-1).mean())


@torch.inference_mode()
def through_the_cache(model, tokens, bits, prompt):
    """Logits of all positions: a prefill pass, then recorded decode steps."""
    cache = Cache(model, 2048, model.device, bits, bits)
    pages = list(range(cache.pages))
    head = np.array(tokens[:prompt], np.int32)
    parts = [forward(model, packed_batch([(head, 0, pages)], range(prompt), cache, model.device)).float().cpu()]
    runner = StepRunner(model, cache, cache.pages)
    for at in range(prompt, len(tokens)):
        parts.append(runner.run([([tokens[at]], at, pages, "a")]).float().cpu().clone())
    assert runner.mode == ("graph" if model.device.type == "cuda" else "tape")
    return torch.cat(parts)


def judge(path, tokens, prompt):
    """Mean KL(CPU || card): whole, and through caches of 16, 8 and 4 bits against a CPU pass through 16."""
    on_cpu, on_card = load(path, "cpu"), load(path, "cuda:0")
    found = {"whole": kl(on_cpu.logits([tokens])[0], on_card.logits([tokens])[0])}
    want = through_the_cache(on_cpu, tokens, 16, prompt)  # frequencies that depend on the length differ from a whole pass
    for bits in (16, 8, 4):
        found[bits] = kl(want, through_the_cache(on_card, tokens, bits, prompt))
    return found


def wider(name, head_dim=64):
    """Heads of a size that cards serve: 64; lists of factors for a rotation as wide."""
    rope = dict(FAMILIES[name][2].get("rope_parameters") or {})
    for key in ("short_factor", "long_factor"):
        if key in rope:
            n = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
            rope[key] = [rope[key][i * len(rope[key]) // n] for i in range(n)]
    if name == "phi3_longrope":  # some versions of transformers check the lists by hidden_size
        return {"hidden_size": 4 * head_dim, "head_dim": head_dim, "rope_parameters": rope}
    return {"head_dim": head_dim} | ({"rope_parameters": rope} if rope else {})


def report(name, found):
    if os.environ.get("EXL3_TEST_REPORT"):
        rounded = {k: float(f"{v:.2g}") for k, v in found.items()}
        with open(os.environ["EXL3_TEST_REPORT"], "a") as f:
            f.write(f"KL {name}: {rounded}\n")


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, FAMILIES[name][0]):
        pytest.skip(f"this transformers has no {FAMILIES[name][0]}")
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(name, tmp_path / "source", **wider(name))
        exl3.convert(tmp_path / "source", tmp_path / "out", 4, cal_rows=4, cal_cols=64, quality="fast", devices="cpu")
    found = judge(tmp_path / "out", ids(1, TOKENS)[0].tolist(), PROMPT)
    report(name, found)
    assert abs(found["whole"]) < 1e-4 and abs(found[16]) < 1e-4
    assert found.get(8, 0.0) < 1e-3 and found.get(4, 0.0) < 0.1


def test_a_model_of_ones_own():
    path = os.environ.get("EXL3_TEST_MODEL")
    if not path:
        pytest.skip("EXL3_TEST_MODEL names no EXL3 directory")
    model = load(path, "cpu")
    text = (ROOT / "benchmarks/data/heldout.txt").read_text(encoding="utf-8")
    tokens = model.tokenizer.encode(text[:4000])[:512] if model.tokenizer is not None else ids(1, 512, model.vocab_size)[0].tolist()
    found = judge(path, [int(t) for t in tokens], 448)
    report(Path(path).name, found)
    assert abs(found["whole"]) < 1e-4 and abs(found[16]) < 1e-4
    assert found.get(8, 0.0) < 1e-3
