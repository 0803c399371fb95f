"""Every environment variable exl3 knows, in one typed table; docs/env_vars.md is generated from it.

exllamav3's documented variables all have a row, so that a user who comes from there learns what became of each: it
works, it does not yet, or it does not apply and why. A variable that is set but has no effect warns once by name.

    settings.get("EXL3_GRAPHS", backend="cuda")     # typed value: set one, else the backend's default
    settings.debug_log("loader").debug("...")       # shown when EXLLAMA_DEBUGLOG_LOADER is in the environment
    python -m exl3.settings > docs/env_vars.md

Loads no torch.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TextIO

from exl3.errors import ArgumentError

Value = bool | int | float | str | list[str] | None
Default = Value | Mapping[str, Value]
Status = Literal["works", "not yet", "not applicable"]
BACKENDS = ("cuda", "rocm", "cpu")

# kind -> how the text of a variable is read
KINDS = {
    "flag": "`0` is off, any other value on",
    "auto": "`0` is off, any other value on; unset or `auto` decides by itself",
    "one": "only `1` is on",
    "present": "on when set at all, to whatever value",
    "int": "whole number",
    "float": "number",
    "text": "text",
    "list": "comma-separated list",
}


@dataclass(frozen=True)
class Setting:
    """One environment variable. `default` is a value, or one per backend; `read` says when it is looked at."""

    name: str
    kind: str  # a key of KINDS, or the choices, "a|b|c"
    default: Default
    status: Status
    meaning: str
    why: str = ""  # not yet or not applicable: the reason, or what to use instead
    read: str = "first use"
    low: int | None = None  # smaller numbers are raised to this
    area: str = field(default="", compare=False)

    def default_for(self, backend: str) -> Value:
        if isinstance(self.default, Mapping):
            return self.default[backend]
        return self.default

    def parse(self, text: str) -> Value:
        """The typed value of a variable's text; ArgumentError where it is none."""
        text = text.strip()
        if self.kind in ("flag", "auto"):
            return None if self.kind == "auto" and text.lower() == "auto" else text != "0"
        if self.kind == "one":
            return text == "1"
        if self.kind == "present":
            return True
        if self.kind == "text":
            return text
        if self.kind == "list":
            return [part.strip() for part in text.split(",") if part.strip()]
        if self.kind in ("int", "float"):
            try:
                value = int(text) if self.kind == "int" else float(text)
            except ValueError:
                raise ArgumentError(f"{self.name}={text!r}: not a {KINDS[self.kind]}; correct it or unset it") from None
            return value if self.low is None else max(value, self.low)
        choices = self.kind.split("|")
        if text.lower() not in choices:
            raise ArgumentError(f"{self.name}={text!r}: use one of {', '.join(choices)}, or unset it")
        return text.lower()


def get(name: str, backend: str = "cpu", environ: Mapping[str, str] | None = None) -> Value:
    """The typed value of a setting: of the environment now, else the backend's default.

    Empty counts as unset (except for `present`). Callers keep the value as long as the table's `read` column says.
    ArgumentError for a name without a row, an unknown backend, or a text that does not parse.
    """
    setting = TABLE.get(name)
    if setting is None:
        raise ArgumentError(f"{name} has no row in the table of settings{_similar(name)}")
    if backend not in BACKENDS:
        raise ArgumentError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    text = (os.environ if environ is None else environ).get(name)
    if text is None or (not text.strip() and setting.kind != "present"):
        return setting.default_for(backend)
    return setting.parse(text)


def changed(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Settings that the environment holds, with their texts: for `exl3 doctor` and bug reports."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in sorted(environ) if name in TABLE or name.startswith((_DEBUGLOG, "EXL3_", "EXLLAMA"))}


def unused(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of the environment that look like settings but have no effect, with the reason."""
    found = {}
    for name in changed(environ):
        setting = TABLE.get(name)
        if setting is None:
            if not name.startswith((_DEBUGLOG, "EXL3_TEST_")):
                found[name] = f"is not a setting of exl3{_similar(name)}"
        elif setting.status != "works" and name not in _FOREIGN:
            found[name] = f"has no effect: {setting.status}{', ' + setting.why if setting.why else ''}"
    return found


def warn_unused() -> None:
    """Warns once per process and name about variables that are set but have no effect."""
    for name, reason in unused().items():
        if name not in _warned:
            _warned.add(name)
            warnings.warn(f"environment variable {name} {reason}", RuntimeWarning, stacklevel=2)


def debug_log(category: str) -> logging.Logger:
    """The logger `exl3.debug.<category>`; EXLLAMA_DEBUGLOG_<CATEGORY> in the environment shows it on stderr, with time stamps."""
    logger = logging.getLogger(f"exl3.debug.{category.lower()}")
    if _DEBUGLOG + category.upper() in os.environ:
        if not any(isinstance(h, _StderrHandler) for h in logger.handlers):
            handler = _StderrHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
            logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    return logger


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is at the time of the message, as tests and notebooks replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


_DEBUGLOG = "EXLLAMA_DEBUGLOG_"
_warned: set[str] = set()


def _similar(name: str) -> str:
    close = difflib.get_close_matches(name, TABLE, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else "; docs/env_vars.md lists all"


# ----------------------------------------------------------------------------------------------------------- the table

# reasons shared by several rows
_STEP = "whole decode steps are recorded, not single layers; see `EXL3_GRAPHS` and `EXL3_STEP`"
_PLAN = "kernels and shapes are chosen by a launch plan computed from the sizes, without measuring or fallback switches"
_TRITON = "nothing is written in Triton"
_FAMILY = "no model family with this kind of layer is supported so far"
_MOE = "no mixture-of-experts family is supported so far"
_MOE_CPU = "experts are not placed on the CPU so far"
_TP = "tensor parallel is not there so far"
_HEADERS = "memory is planned from file headers and shapes, nothing is measured"
_QUANT_GPU = "quantizing on a GPU has one kernel per codebook, without variants to choose"


def _by(cuda: Value, rocm: Value, cpu: Value) -> Mapping[str, Value]:
    return {"cuda": cuda, "rocm": rocm, "cpu": cpu}


def _works(name: str, kind: str, default: Default, meaning: str, read: str = "first use", low: int | None = None) -> Setting:
    return Setting(name, kind, default, "works", meaning, "", read, low)


def _later(name: str, kind: str, default: Default, meaning: str, why: str, read: str = "first use", low: int | None = None) -> Setting:
    return Setting(name, kind, default, "not yet", meaning, why, read, low)


def _never(name: str, kind: str, default: Default, meaning: str, why: str, read: str = "first use", low: int | None = None) -> Setting:
    return Setting(name, kind, default, "not applicable", meaning, why, read, low)


# fmt: off
_ROWS: dict[str, list[Setting]] = {
    "Decode steps and kernels": [
        _works("EXL3_GRAPHS", "flag", _by(True, False, False),
               "record decode steps as device graphs; off: as a tape of native calls, same kernels, same order. The CPU has the tape only",
               read="model creation"),
        _works("EXL3_STEP", "tape|graph|eager", None,
               "ours: how a decode step is run, overriding `EXL3_GRAPHS`; `eager` runs the same Python each time", read="model creation"),
        _works("EXL3_CPU_MAX_ISA", "scalar|avx2|avx512", None,
               "ours: highest instruction tier of the CPU kernels; never above what the CPU has"),
        _works("EXL3_CPU_PLANES", "1|2", "2",
               "ours: int8 planes of activations in CPU products, 2 (fp16-grade) or 1 (faster); `exl3.ops.products.planes` overrides it"),
    ],
    "Attention and recurrent layers": [
        _never("EXL3_BC_ATTN", "flag", True, "attention of a decode step as one recorded call", _STEP, "import"),
        _works("EXL3_BC_ATTN_TRACE", "flag", False,
               "print to stderr for each number of tokens whether a decode step was recorded, and why if not"),
        _never("EXL3_BC_MLA", "flag", True, "the same for MLA layers", _STEP, "import"),
        _never("EXL3_BC_GDN", "flag", True, "the same for gated-delta-net layers", _STEP, "import"),
        _never("EXL3_BC_DSA", "flag", True, "the same for DeepSeek-V4 attention", _STEP, "import"),
        _never("EXL3_BC_DSA_DEBUG", "flag", False, "raise where that call cannot be built", _STEP, "import"),
        _later("EXL3_DSV4_NO_XFAN", "flag", False, "separate input projections in DeepSeek-V4 attention", _FAMILY, "import"),
        _later("EXL3_DSA_DEBUG_BOUNDS", "one", False, "bounds checks in DeepSeek-V4 attention", _FAMILY, "import"),
        _never("EXL3_QKV_SLICE", "flag", _by(True, False, False), "one launch over slices of q, k, v", _PLAN, "import"),
        _works("EXL3_QC_STAGING", "int", 1,
               "prefill over a quantized cache on NVIDIA cards: 0 codes are decoded in the kernel, 1 a long chunk's window is decoded once "
               "into a stage of fp16 pages, 2 every prefill chunk's into a stage as large as its window; recorded steps read codes always",
               low=0),
        _works("EXL3_QC_STAGING_PAGES", "int", 256,
               "pages of that stage in mode 1 (256: 65,536 tokens); a wider window is taken slice by slice", low=1),
        _works("EXL3_QC_PF_TWO_PASS_MIN_Q", "int", 256, "shortest chunk that mode 1 stages, in tokens of a row, on every card", low=0),
        _never("EXL3_QC_PREFILL_NS", "int", 0, "pipeline stages of the direct prefill kernel, 0: measured", _PLAN, "import", low=0),
        _never("EXL3_QC_ATTN", "flag", True, "former name of `EXL3_QC_STAGING`", "exllamav3 replaced it, too", "import"),
        _never("EXL3_SDPA_PREFILL", "auto", None, "prefill through PyTorch's SDPA on Turing",
               "attention has one implementation a backend", "import"),
        _never("EXL3_FA75", "auto", None, "a kernel for 256-wide heads on Turing", "attention has one implementation a backend", "import"),
        _works("EXL3_PREFER_FA2", "flag", False,
               "prefill over an fp16 cache on NVIDIA cards through the package flash-attn (2.6 or later) where it is installed; a warning "
               "says where it is not. Sinks and quantized caches stay with the built-in kernels"),
        _never("EXL3_TRITON_SMEM_LIMIT", "int", None, "shared memory the Triton kernels believe in", _TRITON, "import"),
        _never("EXL3_TRITON_SMEM_DEBUG", "flag", False, "print the Triton kernels' choice of tiles", _TRITON, "import"),
        _later("EXL3_MLA_PREFILL", "mha|absorbed", "mha", "form of MLA prefill", _FAMILY, "import"),
        _later("EXL3_GDN_SUB_CHUNK", "int", 2048, "tokens per scan in gated-delta-net prefill, 0: all", _FAMILY, "import", low=0),
        _later("EXL3_GDN_PROJ_FP32", "flag", False, "fp32 q/k/v projections there", _FAMILY, "import"),
        _later("EXL3_GDN_GATE_FP32", "flag", True, "fp32 gate and beta projections of KDA", _FAMILY, "import"),
        _later("EXL3_GDN_CONV_TOKEN_MAJOR", "flag", True, "short convolution reads projections in place", _FAMILY, "import"),
        _later("EXL3_PLE_SUB_CHUNK", "int", 1024, "tokens per slab in n-gram layers' prefill, 0: all", _FAMILY, "import", low=0),
        _later("EXL3_GR_MIX_TILED", "flag", True, "reproducible int8 mix of gated residual streams", _FAMILY, "import"),
        _later("EXL3_HC_FOLD", "flag", _by(False, True, False),
               "fold hyper-connection updates into neighbouring kernels", _FAMILY, "import"),
    ],
    "Products and quantizer": [
        _never("EXL3_GEMV", "int", 1, "small-row product kernel: 0 off, 1 by heuristic, 2 wherever possible", _PLAN),
        _never("EXL3_GEMV_SMEM", "int", -1, "its way to unpack weights: -1 by rate, 0 shuffles, 1 shared memory", _PLAN),
        _works("EXL3_INT8_GEMV", "0|1|2", _by("1", "0", "1"),
               "int8 activations in GPU products of few rows (NVIDIA: up to four) of mul1 weights: 1 two planes (fp16-grade; ours by "
               "default, exllamav3: 2), 2 one plane (coarse), 0 floating point (NVIDIA: a row then has the same bits in any step of up to "
               "64 rows); "
               "`exl3.ops.products.planes` overrides it"),
        _never("EXL3_INT8_GEMV_MAX_K", "int", None, "highest rate of that path (5; 6 from Hopper on)", _PLAN, low=0),
        _never("EXL3_MGEMM_K_THRESHOLD", "int", None, "rate from which pairs of matrices stay in one launch", _PLAN),
        _never("EXL3_MGEMM_N_THRESHOLD", "int", 8192, "width below which pairs stay in one launch", _PLAN),
        _works("EXL3_NO_FUSED_RECONSTRUCT", "flag", False,
               "prefill in the rotated basis only: products of many rows never rebuild a matrix in fp16, which saves the memory of the "
               "largest one (117 MB for 4096 x 14336); without it Hopper cards do where that is faster"),
        _never("EXL3_HGEMM_F16ACC", "auto", None, "fp16 accumulation in prefill where that is faster",
               "prefill always accumulates in fp32"),
        _never("EXL3_DEBUG_AUTOTUNE", "present", False, "print every autotuning probe", _PLAN),
        _never("EXLLAMAV3_TUNE_CACHE", "text", None, "path of the autotuning results", _PLAN),
        _never("EXL3_QT_OPTIMIZED", "auto", None, "variant of the quantizer's search kernel", _QUANT_GPU),
        _never("EXL3_RDNA_OCC_MAX", "int", 1, "blocks per workgroup processor the autotuner may plan, 0: unbounded",
               "no kernel waits for other blocks of its grid", low=0),
        _never("EXL3_ROCM_MOE_BPS", "int", -1, "the same for the fused expert kernel", "no kernel waits for other blocks of its grid"),
    ],
    "Sampling": [
        _works("EXL3_FUSED_SAMPLER", "flag", True, "sampler stacks as one operation where possible; off: step by step",
               read="generator creation"),
    ],
    "Mixture of experts on the GPU": [
        _later("EXL3_MOE_FUSED_ROWS", "int", _by(128, 512, 128), "rows per expert in the fused kernel", _MOE, "import", low=0),
        _later("EXL3_MOE_FUSED_ROWS_WIDE", "int", 256, "the same for layers with wide tiles", _MOE, "import", low=0),
        _later("EXL3_MOE_FUSED_DET", "flag", True, "reproducible sums over experts", _MOE, "import"),
        _later("EXL3_MOE_RECON_DET", "auto", None,
               "the same for reconstructed experts; unset follows `EXL3_MOE_FUSED_DET`", _MOE, "import"),
        _later("EXL3_MOE_MTILE", "flag", _by(True, False, False), "32- and 64-row tiles in the fused kernel", _MOE, "import"),
        _later("EXL3_MOE_TILE_N", "int", 0, "128 forces 128-column tiles", _MOE, low=0),
        _later("EXL3_MOE_BATCH_RECON", "flag", _by(True, False, False), "reconstruct experts with many rows in batches", _MOE, "import"),
        _later("EXL3_MOE_RECON_BATCH", "int", 16, "experts per batch", _MOE, "import", low=1),
        _later("EXL3_MOE_RECON_ROWS", "int", 16384, "padded rows per batch", _MOE, "import", low=1),
        _later("EXL3_MOE_RECON_MB", "int", 256, "MiB of reconstructed weights per batch", _MOE, "import", low=1),
        _later("EXL3_MOE_RECON_PAD", "float", 1.1, "padded rows per real row before a new batch starts", _MOE, "import"),
        _later("EXL3_MOE_RECON_TILES", "int", 0, "tiles from which an expert goes alone, 0: never", _MOE, "import", low=0),
        _later("EXL3_MOE_RECON_MAX_ROWS", "int", None, "rows from which an expert goes alone", _MOE, "import"),
        _later("EXL3_MOE_RECON_FOLDED", "flag", True, "rotations folded into the reconstructed weights", _MOE, "import"),
        _later("EXL3_MOE_SHARED_COOP", "flag", True, "shared expert as a launch of the fused kernel", _MOE, "import"),
        _later("EXL3_MOE_COOP_KSPLIT", "int", None, "split of the inner dimension in decode", _MOE),
        _later("EXL3_MOE_COOP_WIDE", "auto", None, "tile geometry in decode: 0 narrow, 1 wide", _MOE),
    ],
    "Mixture of experts on the CPU": [
        _later("EXL3_MOE_CPU_OFFLOAD", "int", 0, "layers whose experts lie on the CPU", _MOE_CPU, "load", low=0),
        _later("EXL3_MOE_CPU_THREADS", "int", None,
               "worker threads; unset: physical cores minus `EXL3_MOE_HOST_CORES`", _MOE_CPU, "load", low=1),
        _later("EXL3_MOE_HOST_CORES", "int", 1, "cores kept for the host process", _MOE_CPU, "load", low=0),
        _later("EXL3_MOE_CPU_PIN", "flag", True, "pin worker threads", _MOE_CPU),
        _later("EXL3_MOE_CPU_SPREAD", "flag", False, "spread workers over L3 domains (Linux)", _MOE_CPU),
        _never("EXL3_MOE_CPU_MAX_ISA", "scalar|avx2|bw|avx512bw|vnni|avx512|vbmi", None, "highest instruction tier of expert kernels",
               "`EXL3_CPU_MAX_ISA` caps all CPU kernels"),
        _never("EXL3_MOE_CPU_WIDE", "flag", True, "two int8 planes for rows with outliers", "products take two planes by default"),
        _never("EXL3_MOE_CPU_SWIZZLE", "flag", True, "repack weights for streaming reads", "CPU weights are always repacked", "load"),
        _never("EXL3_MOE_CPU_FRACTIONAL_SWIZZLE", "one", False, "the same for half rates on AVX2", "CPU weights are always repacked",
               "load"),
        _later("EXL3_MOE_CPU_LOAD_BATCH", "int", 32, "experts per read, 0: a layer", _MOE_CPU, "load", low=0),
        _never("EXL3_MOE_CPU_START_TIMEOUT", "float", 60.0, "seconds to wait for the worker process", "there is no worker process", "load"),
        _never("EXL3_MOE_CPU_SLOTS", "int", 4, "job slots of the worker process", "there is no worker process", "load", low=1),
        _never("EXL3_MOE_CPU_SLOT_ROWS", "int", 64, "rows per job slot", "there is no worker process", "load", low=1),
        _later("EXL3_MOE_CPU_WSLOTS", "int", 2, "slots of the ring that streams experts to the GPU", _MOE_CPU, "load", low=1),
        _later("EXL3_MOE_CPU_WSLOT_MB", "int", 32, "MiB per slot", _MOE_CPU, "load", low=1),
        _later("EXL3_MOE_CPU_STAGE_THREADS", "int", 4, "copying threads of that ring", _MOE_CPU, "load", low=1),
        _later("EXL3_MOE_STREAM_T", "int", None,
               "rows from which an expert is streamed; unset: by bandwidth, from 16", _MOE_CPU, "load", low=0),
        _later("EXL3_MOE_STREAM_FUSED_T", "int", 256, "rows up to which a streamed expert uses the fused kernel", _MOE_CPU, "load", low=0),
        _later("EXL3_MOE_STREAM_MIN_ROWS", "int", 32, "smallest chunk for streaming", _MOE_CPU, "load", low=0),
        _later("EXL3_MOE_STREAM_BATCH_EXPERTS", "int", 24, "experts per transfer, at most 256", _MOE_CPU, "load", low=1),
        _later("EXL3_MOE_STREAM_BATCH_RECON", "flag", True, "reconstruct streamed experts in batches", _MOE_CPU, "import"),
        _later("EXL3_MOE_STREAM_DEBUG", "flag", False, "print what is streamed", _MOE_CPU, "import"),
        _never("EXL3_MOE_MEMOPS", "flag", True, "hand-over by stream memory operations", "there is no worker process", "import"),
        _later("EXL3_MOE_CPU_PROF", "flag", False, "time the phases of expert jobs", _MOE_CPU),
        _never("EXL3_MOE_HANDOFF_PROF", "present", False, "time the hand-over", "there is no worker process"),
        _later("EXL3_MOE_PINNED_ARENA", "flag", False, "expert weights in page-locked memory", _MOE_CPU, "load"),
        _later("EXL3_MOE_CPU_PROMOTE", "int", 4, "spare expert slots on the GPU per layer", _MOE_CPU, "load", low=0),
        _later("EXL3_MOE_CPU_PROMOTE_VERIFY", "present", False, "compare after every transfer", _MOE_CPU, "load"),
        _later("EXL3_MOE_CPU_SWAP_DEBUG", "present", False, "print transfers and hit rate", _MOE_CPU, "load"),
        _later("EXL3_MOE_CPU_SPLIT_STATS", "text", None, "file of expert usage", _MOE_CPU, "load"),
        _later("EXL3_MOE_ARENA_HUGEPAGE", "flag", True, "huge pages for expert weights", _MOE_CPU, "load"),
        _later("EXL3_MOE_ARENA_HUGE", "2m|1g", None, "hugetlbfs pages for page-locked expert weights (Linux)", _MOE_CPU, "load"),
        _later("EXL3_MOE_ARENA_DEBUG", "flag", False, "print their allocation", _MOE_CPU, "load"),
    ],
    "Loading": [
        _works("EXL3_HOST_MEM_RESERVE_MB",
               "int", 2048, "MiB of memory that must stay free when a model is loaded or converted; 0: no check", read="load", low=0),
        _works("EXL3_EXPANDABLE_SEGMENTS", "flag", True,
               "expandable segments in PyTorch's allocator, from the first load on a GPU on; not on Windows, not on ROCm, and not where "
               "`PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF` is set", read="load"),
        _works("EXL3_LOAD_ARENA", "flag", True,
               "tensors that are read together share slabs of up to 512 MiB; off: each has memory of its own", read="load"),
        _later("EXL3_NGRAM_STREAM", "flag", True, "n-gram table read from disk row by row", _FAMILY, "load"),
        _later("EXL3_NGRAM_LOCK", "flag", False, "n-gram table locked in memory", _FAMILY, "load"),
        _later("EXL3_NGRAM_GATHER_PROF", "present", False, "print statistics of those reads (Windows)", _FAMILY),
        _later("EXL3_EMBED_STREAM", "flag", False, "token embedding read from disk row by row", "the table is always held in memory",
               "load"),
        _later("EXL3_VISION_PINNED", "flag", False, "vision weights in page-locked host memory", "vision towers are not supported so far",
               "load"),
        _never("EXL3_AUTOSPLIT_WORSTCASE", "flag", True, "worst cases added to measured memory", _HEADERS, "load"),
        _never("EXL3_AUTOSPLIT_PREPARE", "flag", True, "lasting buffers made before measuring", _HEADERS, "load"),
        _works("EXL3_AUTOSPLIT_MARGIN_MB", "int", 256, "MiB that must stay free on each GPU when a model is loaded", read="load", low=0),
    ],
    "Several GPUs": [
        _works("EXLLAMA_NO_P2P_COPY", "auto", None,
               "copies between GPUs through host memory: 1 always, 0 never, unset where a trial copy arrives damaged"),
        _later("EXLLAMA_MASTER_ADDR", "text", "127.0.0.1", "rendezvous address of tensor parallel", _TP, "load"),
        _later("EXLLAMA_MASTER_PORT", "int", None, "rendezvous port; unset: a free one", _TP, "load"),
        _later("EXL3_TP_NO_FWD_BARRIER", "flag", True, "no barrier at the start of a pass", _TP, "load"),
        _later("EXL3_TP_NO_FP16_WIRE", "flag", False, "bf16 instead of fp16 between ranks", _TP),
        _later("EXL3_TP_NCCL_FP32", "flag", False, "fp32 sums between ranks", _TP, "load"),
        _never("EXL3_TP_REDUCE_MAX_ISA", "avx|avx2|avx512", None, "highest instruction tier of sums on the CPU", "ranks sum through NCCL"),
        _never("EXL3_TP_REDUCE_THREADS", "int", None, "threads of sums on the CPU", "ranks sum through NCCL", low=1),
        _later("EXL3_TP_SPIN_RECV", "int", 0, "milliseconds a rank spins for its next command", _TP, "load", low=0),
        _later("EXL3_TP_ROUTING_CHECK", "flag", False, "compare the ranks' choice of experts", _TP, "load"),
        _later("EXL3_TP_STREAM_HASH", "int", 0, "passes whose residual stream is printed as digests", _TP, "load", low=0),
        _later("EXL3_TP_TRACE_WIRE", "flag", False, "print when the fp16 wire is used", _TP),
    ],
    "Debugging": [
        _works("EXLLAMA_DEBUGLOG_<CATEGORY>", "present", False,
               "time-stamped debug log of one category, `BACKEND` or `LOADER`, on Python's `logging` as `exl3.debug.<category>`"),
        _works("EXL3_HIP_LIB", "text", None,
               "ours: file of the HIP runtime (libamdhip64.so) to use; unset: the one torch loaded, else the first found"),
        _works("ROCPROFILER_REGISTER_ENABLED", "text", "0",
               "ROCm's profiler registration, which keeps a core busy; `import exl3` sets 0 if unset. Set 1 for torch.profiler on ROCm",
               read="import"),
        _never("XDG_CACHE_HOME", "text", None, "folder of caches", "nothing is cached between runs"),
    ],
    "Building": [
        _works("EXLLAMA_EXT_LINEINFO", "present", False, "line tables in CUDA kernels, for profilers", read="build"),
        _works("EXLLAMA_EXT_COMPRESS", "0|1|auto|require", None,
               "size compression of GPU kernels: 0 off, auto where nvcc has it (12.8; AMD code always), require or fail", read="build"),
        _works("CUDAHOSTCXX", "text", None, "host compiler of nvcc, read by CMake itself", read="build"),
        _works("TORCH_CUDA_ARCH_LIST", "list", None, "architectures of a CUDA build, as `8.6 9.0a 12.0+PTX`; `EXL3_CUDA_ARCHS` goes first",
               read="build"),
        _works("TORCH_NO_COMPILER_WRAPPER", "present", False, "no sccache or ccache in front of the compilers", read="build"),
        _works("MAX_JOBS", "int", None, "most compilers at a time", read="build", low=1),
        _works("EXL3_BACKENDS", "list", "cpu", "ours: kernel libraries that a build makes, of cpu, cuda, rocm", read="build"),
        _works("EXL3_CUDA_ARCHS", "list", None, "ours: architectures of a CUDA build, as `80 90a`", read="build"),
        _works("EXL3_ROCM_ARCHS", "list", "family",
               "ours: AMD architectures of a build: `family` (one code object for each of RDNA2, 3 and 4), `quick`, `all` (17 cards by "
               "name), or a list",
               read="build"),
        _works("EXL3_PREBUILT", "text", None, "ours: folder with finished kernel libraries; a build then compiles none", read="build"),
        _works("EXLLAMA_NOCOMPILE", "one", False, "ours: 1 installs the Python files alone, which run in plain torch",
               read="build"),
        _works("PYTORCH_CUDA_ALLOC_CONF", "text", None, "PyTorch's own; never touched", read="import"),
    ],
}
# fmt: on

TABLE: dict[str, Setting] = {}
for _area, _rows in _ROWS.items():
    for _row in _rows:
        object.__setattr__(_row, "area", _area)
        TABLE[_row.name] = _row

# set by users for other programs: no warning where they have no effect here
_FOREIGN = {"XDG_CACHE_HOME"}


def markdown() -> str:
    """The text of docs/env_vars.md."""
    count = {status: sum(s.status == status for s in TABLE.values()) for status in ("works", "not yet", "not applicable")}
    lines = [
        "# Environment variables",
        "",
        "Generated by `python -m exl3.settings`; do not edit. Set variables before the program starts; *read* says when each is looked at.",
        "exllamav3's documented variables are all here, with what became of them. One that is set but has no effect warns once by name.",
        "",
        f"{count['works']} work, {count['not yet']} do not yet, {count['not applicable']} do not apply.",
        "",
        "| type | how the text is read |",
        "|---|---|",
        *(f"| {kind} | {meaning} |" for kind, meaning in KINDS.items()),
        "| `a`, `b` ... | one of these words, in any case |",
        "",
        "Empty counts as unset. A text that does not fit its type is an error that names the variable.",
        "Where one default is given it holds for all backends; else they stand as CUDA / ROCm / CPU.",
    ]
    for area, rows in _ROWS.items():
        lines += ["", f"## {area}", "", "| variable | type | default | read | status | meaning |", "|---|---|---|---|---|---|"]
        for s in rows:
            kind = s.kind if s.kind in KINDS else ", ".join(f"`{c}`" for c in s.kind.split("|"))
            default = " / ".join(_show(s.default[b]) for b in BACKENDS) if isinstance(s.default, Mapping) else _show(s.default)
            why = f". {s.why[0].upper()}{s.why[1:]}" if s.why else ""
            lines.append(f"| `{s.name}` | {kind} | {default} | {s.read} | {s.status} | {s.meaning}{why} |")
    return "\n".join(lines) + "\n"


def _show(value: Value) -> str:
    if value is None:
        return "unset"
    return f"`{int(value)}`" if isinstance(value, bool) else f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(markdown())
else:
    warn_unused()
