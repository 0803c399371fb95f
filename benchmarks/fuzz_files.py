"""Mutates the files a model directory consists of and looks for anything but a result or a typed error.

    python benchmarks/fuzz_files.py --minutes 5 [--seed N] [--target safetensors] [--json OUT]

A finding is an exception that is no `Exl3Error`, more than ten seconds for one case, Python allocations out of proportion to
the file, or tensor memory beyond the file's size. The case's seed is printed; `--seed N --minutes 0` runs it alone.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exl3.errors import Exl3Error
from exl3.files import GGUF, Checkpoint, Tokenizer, import_gguf, slabs
from exl3.files import config as cfg

SECONDS = 10.0
EXTREMES = [
    0,
    1,
    -1,
    7,
    255,
    2**15,
    2**31,
    2**32 - 1,
    2**40,
    2**63,
    2**64 - 1,
    2**80,
    1e300,
    0.5,
    True,
    False,
    None,
    "",
    "x",
    "F16",
    [],
    {},
    [[]],
    [1, 2],
]

# ------------------------------------------------------------------------------------------------------------------ seeds


def safetensors_seed() -> bytes:
    """Two EXL3 matrices, an embedding in rings, an fp8 and a dense matrix, laid out unaligned."""
    g = torch.Generator().manual_seed(0)
    tensors: dict[str, tuple[str, list[int], int]] = {
        "model.embed_tokens.trellis": ("I16", [4, 33], 2),
        "model.embed_tokens.signs": ("F16", [1, 256], 2),
        "model.layers.0.q_proj.suh": ("F16", [128], 2),
        "model.layers.0.q_proj.svh": ("F16", [128], 2),
        "model.layers.0.q_proj.trellis": ("I16", [8, 8, 16], 2),
        "model.layers.0.q_proj.mul1": ("I32", [], 4),
        "model.layers.0.k_proj.su": ("I16", [8], 2),
        "model.layers.0.k_proj.sv": ("I16", [8], 2),
        "model.layers.0.k_proj.trellis": ("I16", [8, 8, 32], 2),
        "model.layers.0.k_proj.mcg": ("I32", [1], 4),
        "model.layers.0.up_proj.weight": ("F8_E4M3", [9, 16], 1),
        "model.layers.0.up_proj.weight_scale_inv": ("F32", [1, 1], 4),
        "model.layers.0.down_proj.weight": ("BF16", [5, 3], 2),
        "model.layers.0.down_proj.bias": ("F32", [5], 4),
        "lm_head.weight": ("F16", [4, 7], 2),
    }
    header, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        n = size * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + torch.randint(0, 256, (at,), dtype=torch.uint8, generator=g).numpy().tobytes()


def config_seed() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "text_config": {"tie_word_embeddings": True, "vocab_size": 64, "eos_token_id": [2, 20]},
        "eos_token_id": [2, None],
        "bos_token_id": 1,
        "vocab_size": 64,
        "quantization_config": {"quant_method": "exl3", "bits": 4.02},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    }


def tokenizer_seed() -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json) of a tiny byte-level BPE."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"he": 256, "hel": 257, "\u0120w": 258}
    backend = Backend(models.BPE(vocab=vocab, merges=[("h", "e"), ("he", "l"), ("\u0120", "w")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    template = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m.content | trim }}{% if loop.last %}{{ eos_token }}{% endif %}"
    template += "{% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "chat_template": template}
    settings["added_tokens_decoder"] = {"259": {"content": "<s>", "special": True}, "261": {"content": "<tool>", "lstrip": True}}
    return json.loads(backend.to_str()), settings


def gguf_seed() -> bytes:
    """A one-block Qwen2 with a byte-level vocabulary."""

    def string(s: str) -> bytes:
        return struct.pack("<Q", len(s.encode())) + s.encode()

    def kv(key: str, value: Any) -> bytes:
        if isinstance(value, str):
            return string(key) + struct.pack("<I", 8) + string(value)
        if isinstance(value, float):
            return string(key) + struct.pack("<If", 6, value)
        if isinstance(value, int):
            return string(key) + struct.pack("<II", 4, value)
        if value and isinstance(value[0], str):
            return string(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(string, value))
        return string(key) + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)

    vocab = tokenizer_seed()[0]["model"]["vocab"]
    tokens = [*sorted(vocab, key=vocab.get), "<s>", "</s>", "[PAD]"]
    n, h = len(tokens), 32
    pairs = {"general.architecture": "qwen2", "qwen2.block_count": 1, "qwen2.embedding_length": h, "qwen2.feed_forward_length": 32}
    pairs |= {"qwen2.attention.head_count": 2, "qwen2.attention.head_count_kv": 1, "qwen2.context_length": 64, "qwen2.rope.freq_base": 1e4}
    pairs |= {"qwen2.attention.layer_norm_rms_epsilon": 1e-6, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
    pairs |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (n - 3) + [3, 3, 5],
        "tokenizer.ggml.merges": ["h e", "he l", "\u0120 w"],
    }
    pairs |= {"tokenizer.ggml.bos_token_id": n - 3, "tokenizer.ggml.eos_token_id": n - 2, "tokenizer.chat_template": "{{ messages }}"}
    shapes = {"token_embd.weight": [h, n], "output_norm.weight": [h], "blk.0.attn_norm.weight": [h], "blk.0.ffn_norm.weight": [h]}
    shapes |= {
        "blk.0.attn_q.weight": [h, 32],
        "blk.0.attn_k.weight": [h, 16],
        "blk.0.attn_v.weight": [h, 16],
        "blk.0.attn_output.weight": [32, h],
    }
    shapes |= {"blk.0.ffn_gate.weight": [h, 32], "blk.0.ffn_up.weight": [h, 32], "blk.0.ffn_down.weight": [32, h]}
    infos, data = b"", b""
    for name, dims in shapes.items():
        kind, size = (8, 34 / 32) if len(dims) == 2 else (0, 4)
        infos += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        body = bytes(int(size * np.prod(dims)))
        data += body + bytes(-len(body) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(pairs)) + b"".join(kv(k, v) for k, v in pairs.items()) + infos
    return head + bytes(-len(head) % 32) + data


# -------------------------------------------------------------------------------------------------------------- mutations


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few flips, cuts, insertions, repeats and overwritten integers."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            del out[at : at + rng.choice([1, 2, 8, 100])]
        elif kind == 3:
            out[at:at] = rng.randbytes(rng.choice([1, 4, 8, 64]))
        elif kind == 4:
            out[at:at] = out[at : at + rng.choice([1, 8, 200])] * rng.choice([1, 2, 50])
        else:
            code = rng.choice(["<B", "<I", "<Q"])
            limit = 2 ** (8 * struct.calcsize(code))
            value = struct.pack(code, rng.choice([0, 1, 2**7, limit // 2, limit - 1, len(data), rng.randrange(limit)]) % limit)
            at = rng.choice([at, at, 0, 4, 8, 16])
            out[at : at + len(value)] = value
        if not out:
            break
    return bytes(out)


def mutate_json(rng: random.Random, value: Any) -> Any:
    """One to four places of a JSON value replaced, dropped, doubled or moved (the value itself is left alone)."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 2, 4])):
        places: list[tuple[Any, Any]] = []
        todo = [value]
        while todo and len(places) < 3000:
            node = todo.pop()
            keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
            for key in keys:
                places.append((node, key))
                todo.append(node[key])
        if not places:
            break
        node, key = rng.choice(places)
        kind = rng.randrange(6)
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, dict):
            node[rng.choice(["", "a", "\ud800", "x" * 1000, *list(node)[:3]])] = node.pop(key)
        elif kind == 2:
            other, place = rng.choice(places)
            try:
                node[key] = json.loads(json.dumps(other[place]))
            except (KeyError, IndexError):
                pass
        elif kind == 3 and isinstance(node[key], str) and node[key]:
            text = node[key]
            at = rng.randrange(len(text))
            node[key] = (
                text[:at]
                + rng.choice(["", "{%", "}}", "\0", "\ud800", "{{", "%", text, "(", "9" * 30])
                + text[at + rng.choice([0, 1, 5]) :]
            )
        else:
            node[key] = json.loads(json.dumps(rng.choice(EXTREMES)))
    return value


# ---------------------------------------------------------------------------------------------------------------- targets


def fuzz_safetensors(rng: random.Random, directory: Path) -> int:
    data = safetensors_seed()
    if rng.random() < 0.6:  # a header that parses but lies
        n = struct.unpack("<Q", data[:8])[0]
        text = json.dumps(mutate_json(rng, json.loads(data[8 : 8 + n]))).encode()
        data = struct.pack("<Q", len(text)) + text + data[8 + n :]
    else:
        data = mutate_bytes(rng, data)
    (directory / "model.safetensors").write_bytes(data)
    (directory / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(directory)
    checkpoint.read(checkpoint.tensors)
    linears = {}
    for key in checkpoint.linear_keys():
        try:
            linears[key] = checkpoint.linear(key, shape=rng.choice([None, (128, 128)]))
        except Exl3Error:
            continue
    for key, linear in linears.items():
        try:
            checkpoint.load_linears({key: linear}, dtype=rng.choice([None, torch.float16]), check=True)
        except Exl3Error:
            continue
    for find in (lambda: checkpoint.embedding("model.embed_tokens"), lambda: checkpoint.head("lm_head", "model.embed_tokens")):
        try:
            find()
        except Exl3Error:
            continue
    checkpoint.unused([])
    return len(data)


def fuzz_config(rng: random.Random, directory: Path) -> int:
    sizes = 0
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        text = json.dumps(mutate_json(rng, config_seed())).encode()
        text = mutate_bytes(rng, text) if rng.random() < 0.3 else text
        (directory / name).write_bytes(text)
        sizes += len(text)
    (directory / "model.safetensors").write_bytes(safetensors_seed())
    checkpoint = Checkpoint.open(directory)
    checkpoint.eos_ids()
    cfg.tie_flag(checkpoint.config)
    cfg.write_config(directory, checkpoint.config, {"quant_method": "exl3"}, has_head=True)
    cfg.architecture(checkpoint.config)
    return sizes + 10_000


def fuzz_tokenizer(rng: random.Random, directory: Path) -> int:
    backend, settings = tokenizer_seed()
    which = rng.randrange(3)
    texts = [json.dumps(mutate_json(rng, value) if which == i else value).encode() for i, value in enumerate((backend, settings))]
    if which == 2:
        i = rng.randrange(2)
        texts[i] = mutate_bytes(rng, texts[i])
    (directory / "tokenizer.json").write_bytes(texts[0])
    (directory / "tokenizer_config.json").write_bytes(texts[1])
    size = len(texts[0]) + len(texts[1])
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    ids = tokenizer.encode("hello wörld <s></s>\n\U0001f600", add_bos=None)
    tokenizer.decode(ids)
    stream = tokenizer.stream()
    stream.push(ids) + stream.finish()
    tokenizer.encode("hello", special=False)
    tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    return size


def fuzz_gguf(rng: random.Random, directory: Path) -> int:
    data = mutate_bytes(rng, gguf_seed())
    path = directory / "m.gguf"
    path.write_bytes(data)
    gguf = GGUF(path)
    with np.errstate(all="ignore"):
        for name in gguf.tensors:
            gguf.read(name)
        import_gguf(path, directory / "out")
        checkpoint = Checkpoint.open(directory / "out")
        checkpoint.read(checkpoint.tensors)
        Tokenizer.from_directory(directory / "out")
    return len(data)


TARGETS: dict[str, Callable[[random.Random, Path], int]] = {
    "safetensors": fuzz_safetensors,
    "config": fuzz_config,
    "tokenizer": fuzz_tokenizer,
    "gguf": fuzz_gguf,
}


def run_case(target: str, seed: int) -> str:
    """One case: "ok" or the name of the typed error it ended in. Raises whatever is a finding."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz"))
    allocated: list[int] = []
    real = slabs._aligned_empty

    def counted(size: int, device: torch.device) -> torch.Tensor:
        allocated.append(size)
        return real(size, device)

    slabs._aligned_empty = counted
    tracemalloc.start()
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            TARGETS[target](random.Random(seed), directory)
            outcome = "ok"
    except Exl3Error as e:
        outcome = type(e).__name__
        str(e).encode()  # the message can be printed
    finally:
        slabs._aligned_empty = real
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        seconds = time.monotonic() - start
        written = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
        shutil.rmtree(directory)
    if seconds > SECONDS:
        raise AssertionError(f"took {seconds:.1f} s")
    if peak > 64 * written + (8 << 20):
        raise AssertionError(f"allocated {peak} bytes for {written} bytes of files")
    if max(allocated, default=0) > 2 * written + (1 << 20):
        raise AssertionError(f"asked for {max(allocated)} bytes of tensors from {written} bytes of files")
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each case counts one up")
    parser.add_argument("--target", choices=list(TARGETS))
    parser.add_argument("--json", help="write the counts there")
    args = parser.parse_args()
    targets = [args.target] if args.target else list(TARGETS)
    counts: dict[str, Counter[str]] = {t: Counter() for t in targets}
    findings, seed, end = [], args.seed, time.monotonic() + 60 * args.minutes
    while seed == args.seed or time.monotonic() < end:
        for target in targets:
            try:
                counts[target][run_case(target, seed)] += 1
            except BaseException as e:
                if isinstance(e, KeyboardInterrupt | SystemExit):
                    raise
                findings.append({"target": target, "seed": seed, "error": f"{type(e).__name__}: {str(e)[:200]}"})
                print(f"FINDING {findings[-1]}", flush=True)
        seed += 1
    for target in targets:
        print(f"{target:12s} {sum(counts[target].values()):7d} cases  " + "  ".join(f"{k} {v}" for k, v in counts[target].most_common()))
    if args.json:
        git = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        result = {"name": "fuzz_files", "device": "cpu", "versions": {"torch": torch.__version__}, "commit": git.stdout.strip()}
        result |= {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "minutes": args.minutes,
            "seed": args.seed,
            "findings": findings,
        }
        Path(args.json).write_text(json.dumps({**result, "rows": {t: dict(c) for t, c in counts.items()}}, indent=2) + "\n")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
