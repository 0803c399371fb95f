"""How fast the converter is on a GPU: one matrix, a model directory through the command line, a model shape with random weights.

    python benchmarks/quantize_speed.py matrix [--rates 4 3 2] [--seeds 3]
    python benchmarks/quantize_speed.py model MODEL_DIR [--option --preset --option incumbent]
    python benchmarks/quantize_speed.py shape [--blocks 2] [-d 0,1] [--cal-rows 128]

matrix: 4096x4096 Gaussian weights; its Hessian comes from 8192 Gaussian inputs, so its eigenvalues spread like those of a sample
covariance at two samples a channel. Timed from weights and Hessian to packed tensors on the device, settings of `--preset incumbent`.
shape: Llama-3.1-8B's sizes with fewer blocks and a smaller vocabulary, `--preset incumbent`; the whole model's time is extrapolated from
the time of a block, of the head per weight, and the rest. Each adds a record to benchmarks/results/quantize_speed.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS, VOCAB = 4096, 14336, 32, 8, 32, 128256


def matrix(args: argparse.Namespace) -> list[dict[str, Any]]:
    from exl3.quantize.convert import _encoder
    from exl3.quantize.hessian import Hessian
    from exl3.quantize.linear import Group, Member, Settings, quantize_groups

    device, n = torch.device("cuda", 0), 4096
    encode, settings = _encoder("mul1"), Settings(scaled_hessian=False, search_scale=True)
    rows: dict[float, dict[str, Any]] = {k: {"K": k, "seconds": [], "proxy_error": []} for k in args.rates}
    for seed in range(args.seeds):
        g = torch.Generator(device).manual_seed(seed)
        hessian = Hessian("x", n, device)
        hessian.add(torch.randn(2 * n, n, device=device, generator=g))
        group = Group("x", [Member("x", torch.randn(n, n, device=device, generator=g), args.rates[0])], hessian)
        for k in [args.rates[0], *args.rates] if seed == 0 else args.rates:  # once more at first, to warm up
            group.members[0].rate = k
            torch.cuda.synchronize()
            begin = time.perf_counter()
            [q] = quantize_groups([group], encode, settings)
            torch.cuda.synchronize()
            rows[k]["seconds"].append(time.perf_counter() - begin)
            rows[k]["proxy_error"].append(q.report.proxy_error)
    for k, row in rows.items():
        seconds = row["seconds"][1:] if k == args.rates[0] else row["seconds"]
        errors = row["proxy_error"][1:] if k == args.rates[0] else row["proxy_error"]
        row |= {"seconds": min(seconds), "Mw/s": round(n * n / min(seconds) / 1e6, 1), "proxy_error": sum(errors) / len(errors)}
    return list(rows.values())


def model(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "exl3",
            "convert",
            "-i",
            args.model,
            "-o",
            f"{folder}/out",
            "-b",
            str(args.bits),
            "-d",
            args.device,
        ]
        begin = time.perf_counter()
        subprocess.run([*command, *args.option, "--json", f"{folder}/report.json"], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
        report = json.loads(Path(folder, "report.json").read_text())
    options = " ".join(args.option)
    return [{"bits": args.bits, "options": options, "command_s": round(seconds, 2), "convert_s": round(report["seconds"], 2)}]


def write_shape(folder: Path, blocks: int, vocab: int) -> None:
    """A Llama directory with random weights."""
    from safetensors.torch import save_file

    kv = HIDDEN // HEADS * KV_HEADS
    sizes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN)}
    sizes |= {"self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INTERMEDIATE, HIDDEN)}
    sizes |= {"mlp.up_proj": (INTERMEDIATE, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE)}
    tensors = {"model.embed_tokens.weight": _random(vocab, HIDDEN), "lm_head.weight": _random(vocab, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for i in range(blocks):
        tensors |= {f"model.layers.{i}.{name}.weight": _random(*size) for name, size in sizes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": blocks, "vocab_size": vocab,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def _random(rows: int, cols: int) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (torch.randn(rows, cols, device=device) * 0.02).to(torch.bfloat16).cpu()


def shape(args: argparse.Namespace) -> list[dict[str, Any]]:
    import exl3

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        source.mkdir()
        write_shape(source, args.blocks, args.vocab)
        torch.cuda.empty_cache()
        for i in range(torch.cuda.device_count() if args.memory else 0):
            torch.cuda.set_per_process_memory_fraction(args.memory * 2**30 / torch.cuda.get_device_properties(i).total_memory, i)
        options = {"preset": "incumbent", "cal_rows": args.cal_rows, "cal_cols": 2048, "devices": args.device}
        begin = time.perf_counter()
        report = exl3.convert(source, Path(folder, "out"), args.bits, **options)
        seconds = time.perf_counter() - begin
    times = [b.seconds for b in report.blocks]
    block, head = min(times[:-1]), times[-1] * VOCAB / args.vocab
    rest = seconds - sum(times)
    peak = max(torch.cuda.max_memory_reserved(i) for i in range(torch.cuda.device_count())) / 2**30
    return [
        {
            "bits": args.bits, "devices": args.device, "blocks": args.blocks, "vocab": args.vocab, "tokens": args.cal_rows * 2048,
            "block_s": [round(t, 2) for t in times[:-1]], "head_s": round(times[-1], 2), "rest_s": round(rest, 2),
            "memory_GiB": args.memory, "extrapolated_8B_s": round(LAYERS * block + head + rest, 1), "peak_GiB": round(peak, 2),
            "proxy_error": report.proxy_error, "warnings": report.warnings,
        }
    ]  # fmt: skip


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--commit", default="")
    ap.add_argument("--bits", type=float, default=4)
    ap.add_argument("-d", "--device", default="cuda:0")
    sub = ap.add_subparsers(dest="what", required=True)
    one = sub.add_parser("matrix")
    one.add_argument("--rates", type=float, nargs="+", default=[4, 3, 2])
    one.add_argument("--seeds", type=int, default=3)
    two = sub.add_parser("model")
    two.add_argument("model")
    two.add_argument("--option", action="append", default=[], help="of `exl3 convert`, one word each")
    three = sub.add_parser("shape")
    three.add_argument("--blocks", type=int, default=2)
    three.add_argument("--vocab", type=int, default=32768)
    three.add_argument("--cal-rows", type=int, default=128)
    three.add_argument("--memory", type=float, default=0, help="GiB the process may take of each card")
    args = ap.parse_args()
    with torch.no_grad():
        rows = {"matrix": matrix, "model": model, "shape": shape}[args.what](args)
    for row in rows:
        print(json.dumps(row), flush=True)
    commit = args.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    record = {
        "name": f"quantize_speed {args.what}",
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rows": rows,
    }
    with open(ROOT / "benchmarks" / "results" / "quantize_speed.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
