"""`exl3.load`: what it accepts, what it refuses and how it says so; sizes, biases, heads (cases C02, C04 dense, C07)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_llama import CONFIG, logits, random_weights, write
from safetensors.torch import save_file
from synthetic_models import kl

import exl3
from exl3.cache import Batch, Cache
from exl3.errors import ArgumentError, FormatError, MissingTensorError, NumericalError, ResourceError, UnsupportedError
from exl3.files import Checkpoint
from exl3.models import FAMILIES, build, loading, locate, memory
from exl3.models.llama import Llama, LlamaBlock
from exl3.nn import Attention
from exl3.ops import memory as machine
from exl3.parallel import plan


def ids(rows: int, tokens: int, vocab: int = 96) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, tokens), generator=torch.Generator().manual_seed(3))


def load(path: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(token|runs slowly).*")
        return exl3.load(path, device="cpu", **options)


def check(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], lengths: tuple[int, ...] = (1, 17)) -> Any:
    model = load(directory)
    for n in lengths:
        assert abs(kl(logits(config, weights, ids(1, n)), model.logits(ids(1, n)))) < 1e-8
    return model


def test_plain_llama(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    model = check(write(tmp_path, CONFIG, weights), CONFIG, weights, (1, 17, 300))
    assert isinstance(model, exl3.Model)
    assert model.device == torch.device("cpu") and model.dtype == torch.float32
    assert model.vocab_size == 96 and model.max_tokens == 512
    assert model.tokenizer is None


def test_logits_takes_lists_and_tensors(tmp_path: Path) -> None:
    model = load(write(tmp_path, CONFIG, random_weights(CONFIG)))
    expected = model.logits(torch.tensor([[5, 6, 7]]))
    assert expected.shape == (1, 3, 96) and expected.dtype == torch.float32
    for form in ([5, 6, 7], [[5, 6, 7]], torch.tensor([5, 6, 7], dtype=torch.int16)):
        assert torch.equal(model.logits(form), expected)


@pytest.mark.parametrize("bad", [[], [[]], [[1, 2], [3]], [0.5], [96], [-1], [[[1]]], "text", [True]])
def test_logits_refuses(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(ArgumentError, match="ids"):
        load(write(tmp_path, CONFIG, random_weights(CONFIG))).logits(bad)


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 160, "num_attention_heads": 4, "head_dim": 64, "num_key_value_heads": 1},
        {"hidden_size": 224, "num_attention_heads": 3, "head_dim": 64, "num_key_value_heads": 3},
        {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 3, "head_dim": 64, "num_key_value_heads": 1},
        {"head_dim": None},
    ],
)
def test_head_dim_rules(tmp_path: Path, sizes: dict[str, Any]) -> None:
    config = {**CONFIG, **sizes}
    weights = random_weights(config)
    model = check(write(tmp_path, config, weights), config, weights, (1, 17, 300))
    dim = config["head_dim"] or 16
    assert model.cache_shapes == [(config["num_key_value_heads"], dim)] * 2


def test_head_dim_absent_and_not_whole(tmp_path: Path) -> None:
    config = {**CONFIG, "hidden_size": 224, "num_attention_heads": 3, "num_key_value_heads": 3}
    del config["head_dim"]
    with pytest.raises(FormatError, match="no head_dim, and hidden_size 224 is not a multiple of num_attention_heads 3"):
        build(config)


class UnevenBlock(LlamaBlock):
    """A layer whose head_dim is not its neighbour's."""

    def make_attention(self, config: Any, layer: int, rotaries: Any) -> Attention:
        from exl3.nn import Rotary, rope_parameters

        dim = [64, 128][layer]
        rotary = Rotary(rope_parameters(config.raw), dim, name=str(dim))
        return Attention(layer, config.hidden_size, config.num_attention_heads, config.kv_heads, dim, rotary)


class Uneven(Llama):
    block_class = UnevenBlock


def test_head_dim_by_layer(tmp_path: Path) -> None:
    """Head size 64, then 128: scale, cache and its bytes are those of each layer."""
    config = {**CONFIG, "num_key_value_heads": 1}
    weights = random_weights(config, head_dims=[64, 128])
    checkpoint = Checkpoint.open(write(tmp_path, config, weights))
    model = Uneven(checkpoint.config)
    found = locate(model, checkpoint)
    model.place("cpu")
    found.load("cpu")
    tokens = ids(1, 300)
    assert abs(kl(logits(config, weights, tokens), model.logits(tokens))) < 1e-8
    cache = Cache(model, 512, "cpu")
    assert cache.bytes == sum(2 * 1 * d * 512 * 16 // 8 for d in (64, 128))
    got = []
    with torch.no_grad():
        for start, stop in ((0, 200), (200, 299), (299, 300)):
            got.append(model(Batch.packed([tokens[0, start:stop].tolist()], [start], [[1, 0]], cache, logits="all")))
    assert abs(kl(model.logits(tokens)[0], torch.cat(got))) < 1e-5


@pytest.mark.parametrize(
    "bias", [("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")]
)
def test_biases_are_used_whatever_the_config_says(tmp_path: Path, bias: tuple[str, ...]) -> None:
    weights = random_weights(CONFIG, bias=bias)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not used.*")
        model = check(write(tmp_path / "m", CONFIG, weights), CONFIG, weights)
    before = model.logits(ids(1, 17))
    for name in bias:
        zeroed = {k: torch.zeros_like(t) if k.endswith(f"{name}.bias") else t for k, t in weights.items()}
        assert (load(write(tmp_path / name, CONFIG, zeroed)).logits(ids(1, 17)) - before).abs().max() > 1e-3


@pytest.mark.parametrize("key", ["model.norm", "model.layers.1.post_attention_layernorm"])
def test_a_norm_s_bias_is_refused_not_dropped(tmp_path: Path, key: str) -> None:
    weights = random_weights(CONFIG)
    write(tmp_path, CONFIG, {**weights, f"{key}.bias": torch.full((64,), 0.1)})
    with pytest.raises(UnsupportedError, match=f"{key}.bias is a bias that Llama has no place for"):
        load(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("flag", "stored", "tied"), [(True, False, True), (True, True, False), (False, True, False), (None, False, True)])
def test_four_forms_of_a_head(tmp_path: Path, flag: bool | None, stored: bool, tied: bool, nested: bool) -> None:
    """Case C01: a stored head wins, whatever the flag; without one the embedding is the head. Logits are those of that head."""
    weights = random_weights(CONFIG)
    weights["model.embed_tokens.weight"] /= 4
    if not stored:
        del weights["lm_head.weight"]
    config = {k: v for k, v in CONFIG.items() if k != "tie_word_embeddings"}
    if flag is not None:
        config |= {"text_config": {"tie_word_embeddings": flag}} if nested else {"tie_word_embeddings": flag}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = exl3.load(write(tmp_path, config, weights), device="cpu")
    told = [str(w.message) for w in seen if "tensor 'lm_head'" in str(w.message) or "the head is used" in str(w.message)]
    assert len(told) == int((flag, stored) in ((True, True), (None, False))), told
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    expected = logits({**CONFIG, "tie_word_embeddings": False}, {**weights, "lm_head.weight": head}, ids(1, 17))
    assert abs(kl(expected, model.logits(ids(1, 17)))) < 1e-8


def test_head_wider_than_the_vocabulary_is_cropped(tmp_path: Path) -> None:
    config = {**CONFIG, "vocab_size": 90}
    weights = random_weights(config)
    wide = {**weights, "lm_head.weight": torch.cat([weights["lm_head.weight"], torch.full((38, 64), 9.0)])}
    wide["model.embed_tokens.weight"] = torch.cat([weights["model.embed_tokens.weight"], torch.full((6, 64), 9.0)])
    model = load(write(tmp_path, config, wide))
    out = model.logits(ids(1, 9, 90))
    assert out.shape[-1] == 90
    assert abs(kl(logits(config, weights, ids(1, 9, 90)), out)) < 1e-8


def test_padded_dense_matrices_are_cropped(tmp_path: Path) -> None:
    """The converter stores unquantized matrices at sizes rounded up to 128."""
    weights = random_weights(CONFIG, bias=("o_proj",))
    padded = dict(weights)
    for name in list(weights):
        if name.endswith("o_proj.weight") or name == "lm_head.weight":
            t = weights[name]
            padded[name] = torch.nn.functional.pad(t, (0, -t.shape[1] % 128, 0, -t.shape[0] % 128), value=3.0)
        if name.endswith("o_proj.bias"):
            padded[name] = torch.nn.functional.pad(weights[name], (0, 64), value=3.0)
    check(write(tmp_path, CONFIG, padded), CONFIG, weights)


def test_tied_head(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    weights = random_weights(config)
    weights["model.embed_tokens.weight"] /= 4
    model = check(write(tmp_path, config, weights), config, weights)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()  # held once


def test_names_without_the_model_prefix(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    bare = {name.removeprefix("model."): t for name, t in weights.items()}
    model = check(write(tmp_path, CONFIG, bare), CONFIG, weights)
    assert model.blocks[1].quant_groups()[0][0][0] == "layers.1.self_attn.q_proj"


def test_missing_tensors_are_all_named(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    gone = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight", "model.norm.weight"]
    write(tmp_path, CONFIG, {k: t for k, t in weights.items() if k not in gone})
    with pytest.raises(MissingTensorError) as error:
        load(tmp_path)
    assert all(name in str(error.value) for name in gone)
    assert "3 tensors" in str(error.value)


def test_unused_tensors_are_named_in_one_warning(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    weights["model.layers.7.extra.weight"] = torch.ones(8, 8)
    weights["stray"] = torch.ones(1)
    write(tmp_path, CONFIG, weights)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exl3.load(tmp_path, device="cpu")
    named = [str(w.message) for w in seen if "not used" in str(w.message)]
    assert len(named) == 1
    assert "2 tensors are not used by Llama: model.layers.7.extra.weight, stray" in named[0]


def test_wrong_shape_is_refused(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    for name, shape in (
        ("model.layers.0.self_attn.k_proj.weight", (48, 64)),
        ("model.norm.weight", (65,)),
        ("model.embed_tokens.weight", (95, 64)),
    ):
        write(tmp_path, CONFIG, {**weights, name: torch.ones(shape)})
        with pytest.raises(FormatError, match=name.removesuffix(".weight").replace(".", r"\.")):
            load(tmp_path)


def test_small_tensors_that_hold_no_numbers_are_refused(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    name = "model.layers.0.input_layernorm.weight"
    write(tmp_path, CONFIG, {**weights, name: torch.ones(64, dtype=torch.int64)})
    with pytest.raises(FormatError, match=name.replace(".", r"\.") + " is of dtype torch.int64"):
        load(tmp_path)
    for value in (float("nan"), float("-inf")):
        write(tmp_path, CONFIG, {**weights, name: torch.cat([torch.ones(63), torch.tensor([value])])})
        with pytest.raises(NumericalError, match=name.replace(".", r"\.")):
            load(tmp_path)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_in_a_matrix_names_tensor_row_and_column(tmp_path: Path, name: str, value: float) -> None:
    weights = random_weights(CONFIG)
    weights[name] = weights[name].clone()
    weights[name][5, 7] = value
    with pytest.raises(NumericalError, match=f"{name}: {value} in row 5, column 7"):
        load(write(tmp_path, CONFIG, weights))


def test_unsupported_architecture_lists_the_supported() -> None:
    with pytest.raises(UnsupportedError) as error:
        build({**CONFIG, "architectures": ["GPT2LMHeadModel"]})
    assert "GPT2LMHeadModel" in str(error.value) and all(name in str(error.value) for name in FAMILIES)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -64),
        ("hidden_size", "64"),
        ("hidden_size", 2**40),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", True),
        ("num_key_value_heads", 3),
        ("vocab_size", 10**12),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-6),
        ("hidden_act", 3),
        ("rope_scaling", "linear"),
        ("rope_theta", "x"),
        ("rope_theta", -1.0),
        ("rope_theta", 0),
        ("tie_word_embeddings", "yes"),
        ("max_position_embeddings", 0),
    ],
)
def test_absurd_configs_are_refused_by_key(key: str, value: Any) -> None:
    with pytest.raises(FormatError, match=key):
        build({**CONFIG, key: value})


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(FormatError, match=f"lacks {key}"):
        build({k: v for k, v in CONFIG.items() if k != key})


def test_unknown_activation_is_named() -> None:
    with pytest.raises(UnsupportedError, match="'mish'"):
        build({**CONFIG, "hidden_act": "mish"})


def test_memory_is_checked_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, CONFIG, random_weights(CONFIG))
    monkeypatch.setattr(memory, "available_bytes", lambda device: 64 << 20)
    monkeypatch.setattr(Checkpoint, "read", lambda *a, **k: pytest.fail("read although memory is short"))
    with pytest.raises(ResourceError, match=r"needs \d+ MiB on cpu .*64 MiB are free.*EXL3_HOST_MEM_RESERVE_MB"):
        load(tmp_path)


def test_reserve_follows_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, CONFIG, random_weights(CONFIG))
    monkeypatch.setattr(memory, "available_bytes", lambda device: 256 << 20)
    monkeypatch.setenv("EXL3_HOST_MEM_RESERVE_MB", "0")
    assert load(tmp_path).max_tokens == 512
    with pytest.raises(ResourceError, match="10000000 tokens of context"):
        load(tmp_path, max_tokens=10_000_000)
    with pytest.raises(ArgumentError, match="max_tokens"):
        load(tmp_path, max_tokens=0)
    assert load(tmp_path, max_tokens=100).max_tokens == 100


def test_context_is_cut_to_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIG, "max_position_embeddings": 1 << 20}
    write(tmp_path, config, random_weights(config))
    monkeypatch.setattr(memory, "available_bytes", lambda device: 64 << 20)
    monkeypatch.setattr(memory, "reserve_bytes", lambda device: 0)
    per_token = 2 * 2 * 2 * 16 * 2  # layers, k and v, kv_heads, head_dim, fp16
    planned = plan(tmp_path, device="cpu")
    assert planned.cache_token_bytes == per_token
    assert (
        planned.largest_context_tokens
        == (64 << 20) // per_token // 256 * 256 - (planned.weights_bytes + planned.workspace_bytes) // per_token // 256 * 256 - 256
    )
    assert not planned.fits
    assert load(tmp_path).max_tokens == planned.largest_context_tokens


def test_plan(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    write(tmp_path, CONFIG, weights)
    p = plan(tmp_path, device="cpu", max_tokens=300, k_bits=8, v_bits=4)
    assert p.weights_bytes == sum(t.nbytes for t in weights.values())
    values = 2 * 2 * 16  # layers, kv_heads, head_dim
    assert p.cache_token_bytes == values * 8 // 8 + values * 4 // 8 + 2 * values // 32 * 2
    assert p.cache_bytes == 512 * p.cache_token_bytes
    assert p.total_bytes == p.weights_bytes + p.cache_bytes + p.workspace_bytes
    assert p.as_dict()["architecture"] == "LlamaForCausalLM"
    with pytest.raises(ArgumentError, match="k_bits"):
        plan(tmp_path, device="cpu", k_bits=9)


def test_container_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 250000\n")
    assert machine._container_bytes(str(tmp_path)) == 550000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._container_bytes(str(tmp_path)) == 1 << 62


def test_shards_without_index_and_adapter_files(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    write(tmp_path, CONFIG, {})
    (tmp_path / "model.safetensors").unlink()
    names = sorted(weights)
    save_file({n: weights[n] for n in names[::2]}, tmp_path / "a.safetensors")
    save_file({n: weights[n] for n in names[1::2]}, tmp_path / "b.safetensors")
    check(tmp_path, CONFIG, weights)


def test_streaming_blocks(tmp_path: Path) -> None:
    """The converter's walk: one block at a time, hooks see the inputs of every matrix, unloading empties it."""
    weights = random_weights(CONFIG)
    checkpoint = Checkpoint.open(write(tmp_path, CONFIG, weights))
    model = build(checkpoint.config)
    locate(model, checkpoint)
    model.place("cpu")
    batch = Batch.whole(ids(2, 9))
    model.load_embed(checkpoint)
    x = model.embed(batch)
    for i in range(2):
        block = model.load_block(i, checkpoint)
        groups = block.quant_groups()
        names = [[name.removeprefix(f"model.layers.{i}.") for name, _ in group] for group in groups]
        assert names == [
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["self_attn.o_proj"],
            ["mlp.gate_proj", "mlp.up_proj"],
            ["mlp.down_proj"],
        ]
        seen: dict[str, torch.Tensor] = {}
        hooks = [
            linear.register_forward_pre_hook(lambda module, args, name=name, seen=seen: seen.update({name: args[0].clone()}))
            for group in groups
            for name, linear in group
        ]
        assert block(x, batch) is x
        for hook in hooks:
            hook.remove()
        for group in groups:
            for name, linear in group:
                assert torch.equal(linear.weight, weights[f"{name}.weight"])
                assert seen[name].shape == (18, linear.in_features)
                assert torch.equal(seen[name], seen[group[0][0]])
        model.unload_block(i)
        assert not any(linear.loaded for group in groups for _, linear in group)
    model.load_head(checkpoint)
    assert abs(kl(logits(CONFIG, weights, ids(2, 9)), model.head(x, batch).view(2, 9, -1))) < 1e-8


def test_no_tokenizer_is_said_once(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, random_weights(CONFIG))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = exl3.load(tmp_path, device="cpu")
    assert [str(w.message) for w in seen if "tokenizer.json" in str(w.message)] == [
        f"{tmp_path}: no tokenizer.json, so text is not available; token ids are"
    ]
    assert model.tokenizer is None and model.logits([1, 2]).shape == (1, 2, 96)


def test_tokenizer_is_read_on_first_use(tmp_path: Path) -> None:
    import tokenizers

    write(tmp_path, CONFIG, random_weights(CONFIG))
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.save(str(tmp_path / "tokenizer.json"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*runs slowly.*")
        model = exl3.load(tmp_path, device="cpu")
    assert model.tokenizer.encode("b") == [1]
    assert model.tokenizer is model.tokenizer


def test_generate_is_the_engine_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write(tmp_path, CONFIG, random_weights(CONFIG)))
    monkeypatch.setattr(exl3.generate, "generate", lambda *args, **options: (args, options))
    assert model.generate("hi", 5, temperature=0.5, seed=1) == ((model, "hi", 5, 0.5), {"stream": False, "seed": 1})
    assert model.generate("hi", 5, 0.5, 3, stream=True) == ((model, "hi", 5, 0.5, 3), {"stream": True})


@pytest.mark.parametrize("path", [None, 5, b"model"])
def test_path_that_is_none(path: Any) -> None:
    with pytest.raises(ArgumentError, match="path of a model directory"):
        exl3.load(path)


@pytest.mark.parametrize("device", ["gpu", "cpu:x", 3.5])
def test_unknown_device(tmp_path: Path, device: Any) -> None:
    write(tmp_path, CONFIG, random_weights(CONFIG))
    with pytest.raises(ArgumentError, match="device is"):
        exl3.load(tmp_path, device=device)


@pytest.mark.parametrize("tokens", [0, -5, 2.5, "512", True])
def test_impossible_max_tokens(tmp_path: Path, tokens: Any) -> None:
    with pytest.raises(ArgumentError, match="max_tokens is"):
        load(write(tmp_path, CONFIG, random_weights(CONFIG)), max_tokens=tokens)


def test_unload_lets_go_and_load_fills_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, CONFIG, random_weights(CONFIG)))
    model = load(tmp_path)
    before = model.logits([3, 4, 5])
    model.unload()
    assert model.device.type == "meta" and all(p.is_meta for p in model.parameters())
    model.place("cpu")
    model.load_modules(model.parts, checkpoint)
    assert torch.equal(model.logits([3, 4, 5]), before)


def test_default_device_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loading.default_device() == torch.device("cpu")
