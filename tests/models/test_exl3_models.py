"""Models with EXL3 matrices: random rings are valid matrices, so a model of them is judged against the dense model of their decoded
weights, in fp64. Sizes that are no multiples of 128 (case C04), every rate, biases, groups, hooks, heads, ring-quantized embeddings."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_llama import CONFIG, logits, random_weights, write
from synthetic_models import kl
from torch import Tensor

from exl3 import codec, ops
from exl3.cache import Batch, Cache
from exl3.files import Checkpoint
from exl3.models import build, load, locate
from exl3.models.model import Model
from exl3.nn import MLP, Linear, RMSNorm, project

# hidden 192, intermediate 320, keys and values 64 wide
ODD = {**CONFIG, "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
RATES = [
    (1, "mul1"),
    (2, "3inst"),
    (3, "mcg"),
    (4, "mul1"),
    (5, "3inst"),
    (6, "mcg"),
    (7, "mul1"),
    (8, "3inst"),
    (1.5, "mul1"),
    (2.5, "mul1"),
]


def pad(n: int) -> int:
    return -(-n // 128) * 128


def random_exl3(out: int, inp: int, K: float, codebook: str, seed: int, suh: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors of a random EXL3 matrix, its decoded weight `(out, inp)` fp32). Columns beyond `out` hold noise, as old files do."""
    rng = torch.Generator().manual_seed(seed)
    words = torch.randint(-32768, 32768, (pad(inp) // 16, pad(out) // 16, int(16 * K)), generator=rng).to(torch.int16)
    sign = torch.randint(0, 2, (pad(inp),), generator=rng) * 2.0 - 1
    suh = (sign * (0.8 + 0.4 * torch.rand(pad(inp), generator=rng))).half() if suh is None else suh
    svh = ((torch.rand(pad(out), generator=rng) + 0.5) * inp**-0.5).half()
    tensors = {"trellis": words, "suh": suh.clone(), "svh": svh}
    if codebook != "3inst":
        tensors[codebook] = torch.tensor({"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[codebook] - 2**32, dtype=torch.int32)
    return tensors, codec.dequantize(words, suh, svh, codebook)[:inp, :out].T.contiguous()


def quantize(weights: dict[str, Tensor], shared: bool = False, names: str = "_proj.weight") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors of the EXL3 model, the dense weights it stands for); `shared`: q, k, v and gate, up have one suh each."""
    stored, dense = dict(weights), dict(weights)
    matrices = [name for name in weights if name.endswith(names) or name == "lm_head.weight"]
    suhs: dict[str, Tensor] = {}
    for i, name in enumerate(matrices):
        out, inp = weights[name].shape
        K, codebook = RATES[i % len(RATES)]
        module, _, last = name.removesuffix(".weight").rpartition(".")
        group = f"{module}.{'qkv' if last in ('q_proj', 'k_proj', 'v_proj') else 'gu' if last in ('gate_proj', 'up_proj') else last}"
        tensors, dense[name] = random_exl3(out, inp, K, codebook, i, suhs.get(group) if shared else None)
        suhs[group] = tensors["suh"]
        del stored[name]
        stored |= {f"{name.removesuffix('.weight')}.{role}": t for role, t in tensors.items()}
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in weights:
            dense[bias] = weights[bias].half().float()
            stored[bias] = torch.nn.functional.pad(weights[bias], (0, pad(out) - out), value=5.0).half()
    return stored, dense


def open_model(path: Path) -> Model:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(token|runs slowly).*")
        return load(path, device="cpu")


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(0, 96, (rows, tokens), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=[False, True], ids=["own_suh", "shared_suh"])
def odd(request: Any, tmp_path_factory: Any) -> tuple[Model, dict[str, Tensor]]:
    """An EXL3 model of odd sizes with all biases, every rate and codebook among its matrices, and its dense equal."""
    biased = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    stored, dense = quantize(random_weights(ODD, bias=biased), shared=request.param)
    path = write(tmp_path_factory.mktemp("odd"), ODD, stored)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not used.*")
        return open_model(path), dense


def test_odd_sizes(odd: Any) -> None:
    model, dense = odd
    assert all(linear.exl3 is not None for linear in model.modules() if isinstance(linear, Linear))
    expected = logits(ODD, dense, ids(2, 19))
    assert expected.std() > 0.2
    assert abs(kl(expected, model.logits(ids(2, 19)))) < 1e-6


def test_odd_sizes_through_the_cache(odd: Any) -> None:
    model, _ = odd
    tokens = ids(1, 264)
    cache = Cache(model, 512, "cpu")
    got = []
    with torch.no_grad():
        for start, stop in ((0, 250), (250, 262), (262, 263), (263, 264)):
            got.append(model(Batch.packed([tokens[0, start:stop].tolist()], [start], [[1, 0]], cache, logits="all")))
    assert abs(kl(model.logits(tokens)[0], torch.cat(got))) < 1e-5


def test_scales_do_not_hold_what_was_read(odd: Any) -> None:
    """Scales are views of nothing larger: a trellis that the backend has put into its own layout can be freed."""
    weights = [m.exl3 for m in odd[0].modules() if isinstance(m, Linear)]
    assert all(t.untyped_storage().nbytes() == t.nbytes for w in weights for t in (w.suh, w.svh))


def test_only_wanted_logits(odd: Any) -> None:
    model, _ = odd
    batch = Batch.whole(ids(2, 5))
    with torch.no_grad():
        full = model(batch)
        batch.logits_at = torch.tensor([4, 9], dtype=torch.int32)
        assert torch.allclose(model(batch), full[[4, 9]], atol=1e-4)


def test_hooks_see_inputs_and_change_nothing(odd: Any) -> None:
    """With a pre-hook on every matrix the groups are called one by one: same logits, inputs as wide as the matrix is."""
    model, dense = odd
    plain = model.logits(ids(1, 9))
    seen: dict[str, Tensor] = {}
    linears = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    hooks = [m.register_forward_pre_hook(lambda mod, args, n=n: seen.update({n: args[0].clone()})) for n, m in linears.items()]
    hooked = model.logits(ids(1, 9))
    for hook in hooks:
        hook.remove()
    assert abs(kl(plain, hooked)) < 1e-6
    assert seen.keys() == linears.keys()
    assert all(seen[n].shape == (9, m.in_features) for n, m in linears.items())
    h = dense["model.embed_tokens.weight"][ids(1, 9)[0]]
    h = h / (h.square().mean(-1, keepdim=True) + ODD["rms_norm_eps"]).sqrt() * dense["model.layers.0.input_layernorm.weight"]
    assert torch.allclose(seen["model.layers.0.self_attn.q_proj"], h, atol=1e-5)  # the input after the norm


def test_output_hooks_see_the_product(odd: Any) -> None:
    model, _ = odd
    plain = model.logits(ids(1, 9))
    seen: list[Tensor] = []
    down = model.blocks[0].mlp.down_proj
    hook = down.register_forward_hook(lambda mod, args, out: seen.append((args[0].clone(), out.clone())))
    hooked = model.logits(ids(1, 9))
    hook.remove()
    assert abs(kl(plain, hooked)) < 1e-6
    x, y = seen[0]
    expected = x @ down.exl3.reconstruct(original_basis=True) + down.exl3.bias
    assert torch.allclose(y, expected, atol=1e-3 * float(expected.abs().max()))


def test_group_with_norm_equals_parts() -> None:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(5, 192, generator=rng)
    norm = RMSNorm(192, 1e-5, plus_one=True)
    norm.set(0.2 * torch.randn(192, generator=rng))
    linears, weights = [], []
    for i, out in enumerate((192, 64, 64)):
        tensors, w = random_exl3(out, 192, 4, "mul1", i)
        linear = Linear(192, out)
        linear.set_exl3(ops.Weight(tensors["trellis"], tensors["suh"], tensors["svh"], None, 192, out, "mul1"))
        linears.append(linear)
        weights.append(w)
    h = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + norm.weight.double())
    for y, w in zip(project(x, linears, norm=norm, dtype=torch.float32), weights):
        expected = h @ w.double().T
        assert (y - expected).square().mean().sqrt() < 1e-3 * expected.square().mean().sqrt()


@pytest.mark.parametrize("kinds", ["exl3", "dense", "mixed"])
def test_gated_mlp(kinds: str) -> None:
    """act(gate) * up fused, apart, and with one dense matrix among EXL3 ones."""
    mlp = MLP(192, 320, "gelu_pytorch_tanh")
    weights = {}
    for i, (name, linear) in enumerate((("gate", mlp.gate_proj), ("up", mlp.up_proj), ("down", mlp.down_proj))):
        tensors, w = random_exl3(linear.out_features, linear.in_features, 3, "mcg", i)
        if kinds == "dense" or (kinds == "mixed" and name == "up"):
            linear.set_dense(w)
        else:
            linear.set_exl3(
                ops.Weight(tensors["trellis"], tensors["suh"], tensors["svh"], None, linear.in_features, linear.out_features, "mcg")
            )
        weights[name] = w.double()
    x = torch.randn(7, 192, generator=torch.Generator().manual_seed(5))
    g = x.double() @ weights["gate"].T
    act = 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)))
    expected = (act * (x.double() @ weights["up"].T)) @ weights["down"].T
    residual = torch.ones(7, 192)
    assert mlp(x, residual=residual) is residual
    assert (residual - 1 - expected).square().mean().sqrt() < 2e-3 * expected.square().mean().sqrt()


def test_quantized_head_of_a_tied_model(tmp_path: Path) -> None:
    """The flag still says tied, as files of exllamav3 up to 1.4.1 do; the stored head wins."""
    config = {**CONFIG, "tie_word_embeddings": False}
    stored, dense = quantize(random_weights(config))
    model = open_model(write(tmp_path, {**config, "tie_word_embeddings": True}, stored))
    assert abs(kl(logits(config, dense, ids(1, 9)), model.logits(ids(1, 9)))) < 1e-6


@pytest.mark.parametrize("shards", [1, 2])
def test_ring_quantized_embedding(tmp_path: Path, shards: int) -> None:
    weights = random_weights(ODD)
    rng = torch.Generator().manual_seed(4)
    bits, groups = 3, 1
    trellis = torch.randint(-32768, 32768, (96, groups * (1 + 16 * bits)), generator=rng).to(torch.int16)
    trellis[:, 0] = (0.5 + torch.rand(96, generator=rng)).half().view(torch.int16)
    signs = (torch.randint(0, 2, (groups, 256), generator=rng) * 2 - 1).half()
    stored = {k: t for k, t in weights.items() if k != "model.embed_tokens.weight"}
    stored["model.embed_tokens.signs"] = signs
    if shards == 1:
        stored["model.embed_tokens.trellis"] = trellis
    else:
        stored |= {"model.embed_tokens.shard_0.trellis": trellis[:50].clone(), "model.embed_tokens.shard_1.trellis": trellis[50:].clone()}
    dense = {**weights, "model.embed_tokens.weight": codec.embedding_decode(trellis, signs, 192).float()}
    model = open_model(write(tmp_path, ODD, stored))
    assert model.model.embed_tokens.table is not None
    assert abs(kl(logits(ODD, dense, ids(1, 9)), model.logits(ids(1, 9)))) < 1e-6


def test_swapping_a_matrix_while_streaming(tmp_path: Path) -> None:
    """What the converter does: run a block dense, put the quantized matrix in, run it again."""
    weights = random_weights(CONFIG)
    checkpoint = Checkpoint.open(write(tmp_path, CONFIG, weights))
    model = build(checkpoint.config)
    locate(model, checkpoint)
    model.place("cpu")
    block = model.load_block(0, checkpoint)
    tensors, w = random_exl3(96, 64, 4, "mul1", 0)
    name, linear = block.quant_groups()[2][1]
    assert name == "model.layers.0.mlp.up_proj"
    linear.set_exl3(ops.Weight(tensors["trellis"], tensors["suh"], tensors["svh"], None, 64, 96, "mul1"))
    assert linear.weight is None and linear.loaded
    batch = Batch.whole(ids(1, 5))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    swapped = block(x.clone(), batch)
    linear.set_dense(w)
    assert torch.allclose(block(x.clone(), batch), swapped, atol=1e-3)


@pytest.fixture
def native() -> None:
    """Needs the CPU kernels: without them a step is torch and cannot be recorded."""
    try:
        ops.backend("cpu")
    except ops.native.BackendError as error:
        pytest.skip(str(error))


def test_decode_step_is_native_calls_only(odd: Any, native: None) -> None:
    """A decode step can be recorded (the tape refuses any torch computation), and a replay equals the eager step bit for bit."""
    model, _ = odd
    tokens = ids(1, 40)[0].tolist()
    cache = Cache(model, 256, "cpu")
    with torch.no_grad():
        model(Batch.packed([tokens[:30]], [0], [[0]], cache))
        batch = Batch.packed([tokens[30:31]], [30], [[0]], cache, logits="all")
        tape = ops.Tape("cpu")
        with tape:
            out = model(batch)
        later = Batch.packed([tokens[31:32]], [31], [[0]], cache, logits="all")
        expected = model(later)
        for name in ("ids", "positions", "lengths"):
            getattr(batch, name).copy_(getattr(later, name))
        tape.replay()
    assert torch.equal(out, expected)
