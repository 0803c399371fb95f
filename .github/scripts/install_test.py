"""The first five minutes of a user: a wheel in an empty virtual environment, no compiler, no GPU, a tiny model from end to end.

    python .github/scripts/install_test.py WHEEL [--torch 2.6.0] [--extra-index URL] [--extras]

import, `exl3 doctor`, convert and generate on a tiny model made on the spot. The path holds the environment's scripts alone, so a
compiler cannot be called. --extras installs the optional packages too and then hides each one from a fresh process in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

TINY = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
g = torch.Generator().manual_seed(0)
w = lambda *s: (torch.randn(*s, generator=g) * s[-1] ** -0.5).half()
H, I, V = 128, 256, 300
t = {"model.embed_tokens.weight": w(V, H) * 8, "model.norm.weight": torch.ones(H).half(), "lm_head.weight": w(V, H)}
for i in range(2):
    p = f"model.layers.{i}."
    t |= {p + n + ".weight": torch.ones(H).half() for n in ("input_layernorm", "post_attention_layernorm")}
    t |= {p + f"self_attn.{n}_proj.weight": w(H, H) for n in "qkvo"}
    t |= {p + "mlp.gate_proj.weight": w(I, H), p + "mlp.up_proj.weight": w(I, H), p + "mlp.down_proj.weight": w(H, I)}
out = Path(sys.argv[1]); out.mkdir()
save_file(t, out / "model.safetensors")
json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "intermediate_size": I, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": V, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
  "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0, "torch_dtype": "float16", "bos_token_id": 1,
  "eos_token_id": 2},
  open(out / "config.json", "w"))
save_file({"input_ids": torch.randint(3, V, (4, 128), generator=g)}, out.parent / "calibration.safetensors")
"""

CHECK = """
import json, torch, exl3, sys
reference = exl3.load(sys.argv[1]); quantized = exl3.load(sys.argv[2])
ids = torch.arange(3, 67)[None]
a, b = reference.logits(ids).log_softmax(-1), quantized.logits(ids).log_softmax(-1)
print(json.dumps({"kl": float((a.exp() * (a - b)).sum(-1).mean()), "finite": bool(b.isfinite().all()),
  "native": "cpu" in str(exl3.ops.describe())}))
"""

OPTIONAL = [
    "transformers",
    "llguidance",
    "huggingface_hub",
    "matplotlib",
    "starlette",
    "uvicorn",
    "gguf",
    "triton",
    "flash_attn",
    "scipy",
    "PIL",
]
HIDE = """
import importlib, pkgutil, sys, warnings
warnings.simplefilter("error", ImportWarning)
hidden = sys.argv[1]
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == hidden: raise ModuleNotFoundError(f"No module named {name!r}", name=hidden)
sys.meta_path.insert(0, Hide())
import exl3
for name in exl3.__all__: getattr(exl3, name)
import exl3.cli
for verb, module in exl3.cli.VERBS.items():
    if verb != "serve" or hidden not in ("starlette", "uvicorn", "all"): importlib.import_module("exl3.cli." + module)
print("fine")
"""


class Home:
    """An empty virtual environment whose path holds no compiler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scripts = folder / ("Scripts" if sys.platform == "win32" else "bin")
        self.python = self.scripts / ("python.exe" if sys.platform == "win32" else "python")
        keep = {
            k: v
            for k, v in os.environ.items()
            if k.startswith("PIP_") or k in ("HOME", "LANG", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "OMP_NUM_THREADS")
        }
        self.env = keep | {"PATH": str(self.scripts), "CC": "no-compiler", "CXX": "no-compiler", "PYTHONNOUSERSITE": "1"}
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        found = [c for c in ("cc", "gcc", "g++", "clang", "nvcc", "cl", "ninja", "cmake") if shutil.which(c, path=self.env["PATH"])]
        assert not found, f"compilers on the path: {found}"

    def __call__(self, *command: str, fails: bool = False) -> str:
        done = subprocess.run([str(self.python), *command], env=self.env, cwd=self.folder, capture_output=True, text=True, check=False)
        if (done.returncode != 0) != fails:
            raise SystemExit(f"{' '.join(command)[:300]}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stderr if fails else done.stdout


def step(text: str) -> None:
    print(f"  {text}", flush=True)


def test(wheel: Path, torch: str, extra_index: str, extras: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="exl3-install-") as place:
        home = Home(Path(place) / "venv")
        home("-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:", str(wheel.resolve()))
        said = home("-c", "import exl3; exl3.load", fails=True)
        assert "exl3 needs torch" in said and "pip install" in said, said
        step("without torch: one sentence and the pip line")
        more = ["--extra-index-url", extra_index] if extra_index else []
        wanted = f"{wheel.resolve()}[grammar,serve,plot,hub]" if extras else str(wheel.resolve())
        home(
            "-m",
            "pip",
            "install",
            "-q",
            "--only-binary",
            ":all:",
            *more,
            wanted,
            f"torch=={torch}{'.*' * (torch.count('.') == 1)}" if torch else "torch",
        )
        home("-m", "pip", "check")
        seconds = [float(home("-c", "import time; t = time.perf_counter(); import exl3; print(time.perf_counter() - t)")) for _ in range(3)]
        whole = [
            float(home("-c", "import time; t = time.perf_counter(); import exl3; exl3.load; print(time.perf_counter() - t)"))
            for _ in range(2)
        ]
        step(f"import exl3: {min(seconds):.2f} s, with torch and the loader {min(whole):.2f} s")
        assert min(seconds) < 1.5
        report = json.loads(home("-m", "exl3", "doctor", "--json"))
        assert report["ok"] and report["self_test"]["cpu"] == "passed", report
        step(f"doctor: torch {report['torch']}, self-test passed")
        home("-c", TINY, str(Path(place) / "tiny"))
        tiny, quantized = str(Path(place) / "tiny"), str(Path(place) / "tiny-exl3")
        convert = [
            "-m",
            "exl3",
            "convert",
            "-i",
            tiny,
            "-o",
            quantized,
            "-b",
            "4",
            "-d",
            "cpu",
            "--cal-data",
            str(Path(place) / "calibration.safetensors"),
        ]
        started = time.monotonic()
        home(*convert, "-cr", "4", "-cc", "128", "--quality", "fast")
        step(f"convert: {time.monotonic() - started:.0f} s")
        out = json.loads(home("-m", "exl3", "generate", quantized, "5,6,7,8", "--ids", "-n", "8", "--json"))
        step(f"generate: {out}")
        result = json.loads(home("-c", CHECK, tiny, quantized).splitlines()[-1])
        assert result["finite"] and result["native"] and 0 < result["kl"] < 0.2, result
        step(f"4 bits against the original: mean KL {result['kl']:.4f}")
        for name in [*OPTIONAL, "all"] if extras else ["all"]:
            assert "fine" in home("-c", HIDE, name), name
        step("optional packages: each one hidden in turn" if extras else "optional packages: none is there, all modules import")
        folder = (
            next((home.folder / "lib").glob("python*/site-packages/exl3"))
            if sys.platform != "win32"
            else home.folder / "Lib/site-packages/exl3"
        )
        written = sorted(p.name for p in folder.rglob("*") if p.suffix in (".so", ".pyd", ".dll", ".o"))
        with zipfile.ZipFile(wheel) as archive:
            shipped = sorted(Path(n).name for n in archive.namelist() if n.endswith((".so", ".pyd", ".dll")))
        assert written == shipped, f"binaries that the wheel did not bring: {written}, {shipped}"
        step("nothing was compiled")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="a wheel, or a folder: its wheel for this Python")
    parser.add_argument("--label", default="", help="of the wheel in the folder")
    parser.add_argument("--torch", default="")
    parser.add_argument("--extra-index", default="")
    parser.add_argument("--extras", action="store_true")
    options = parser.parse_args()
    path = options.wheel
    if path.is_dir():
        version = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        pattern = f"exl3-*+{options.label}-{version}-*.whl" if options.label else f"exl3-[!+]*-{version}-*.whl"
        fitting = [p for p in path.glob(pattern) if options.label or "+" not in p.name]
        if len(fitting) != 1:
            raise SystemExit(f"{path}: one wheel of '{options.label}' for {version} wanted, found {[p.name for p in fitting]}")
        path = fitting[0]
    print(f"install test of {path.name}")
    test(path, options.torch, options.extra_index, options.extras)
