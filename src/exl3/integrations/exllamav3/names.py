"""Which public name of exllamav3 lives in which of its modules, and the finder that serves them from here."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

VERSION = "1.6.5"
"""The exllamav3 whose interface this is."""

_HERE = "exl3.integrations.exllamav3"
_STEPS = [
    "SS_Base", "SS_Argmax", "SS_Sample", "SS_Sample_mn", "SS_Temperature", "SS_Normalize", "SS_Sort", "SS_MinP", "SS_TopK", "SS_TopP",
    "SS_NoOp", "SS_RepP", "SS_PresFreqP", "SS_DRY", "SS_XTC", "SS_AdaptiveP", "SS_BanTokens", "SS_LogitBias",
]  # fmt: skip
_HELPERS = ["xtc_default_protected_token_ids", "dry_default_sequence_breaker_tokens", "dry_sequence_breaker_tokens"]
_PRESETS = [
    "DefaultSampler", "ArgmaxSampler", "GreedySampler", "CategoricalSampler", "GumbelSampler", "TopKSampler", "TopPSampler", "ComboSampler",
    "AdaptivePSampler",
]  # fmt: skip
SAMPLERS = {
    **dict.fromkeys(["Sampler", "CustomSampler", *_STEPS, *_HELPERS], "exl3.generate.sampling"),
    **dict.fromkeys(_PRESETS, "exl3.generate.presets"),
}
FILTERS = {"Filter": f"{_HERE}.other", "LLGuidanceFilter": f"{_HERE}.other", "FormatronFilter": f"{_HERE}.other"}
GENERATION = dict.fromkeys(("Generator", "Job", "AsyncGenerator", "AsyncJob"), f"{_HERE}.generation")
_CACHE = (
    "Cache",
    "CacheLayer",
    "CacheLayer_fp16",
    "CacheLayer_quant",
    "CacheLayer_MLA_fp16",
    "CacheLayer_MLA_quant",
    "CacheLayer_dsa",
    "RecurrentCache",
)
CACHE = dict.fromkeys(_CACHE, f"{_HERE}.cache")
EMBEDDING = dict.fromkeys(("MMEmbedding", "FIRST_MM_EMBEDDING_INDEX", "global_allocator"), f"{_HERE}.other")
CONFIG, MODEL = {"Config": f"{_HERE}.config"}, {"Model": f"{_HERE}.model"}
TOKENIZER = {"Tokenizer": f"{_HERE}.tokenizer"}
_ROOT_CACHE = {name: CACHE[name] for name in ("Cache", "CacheLayer_fp16", "CacheLayer_quant")}
_ROOT = {**CONFIG, **MODEL, **TOKENIZER, "MMEmbedding": EMBEDDING["MMEmbedding"], **_ROOT_CACHE, **GENERATION, **FILTERS, **SAMPLERS}

# module below exllamav3 ("" is the root) -> public name -> module of ours that defines it
MODULES: dict[str, dict[str, str]] = {
    "": _ROOT,
    "model_init": dict.fromkeys(("add_args", "init", "get_arg_sampler"), f"{_HERE}.model_init"),
    "cache": CACHE,
    "cache.cache": CACHE,
    "tokenizer": {**TOKENIZER, **EMBEDDING},
    "tokenizer.tokenizer": TOKENIZER,
    "tokenizer.mm_embedding": EMBEDDING,
    "generator": {**GENERATION, **SAMPLERS, **FILTERS},
    "generator.generator": {"Generator": GENERATION["Generator"]},
    "generator.job": {"Job": GENERATION["Job"]},
    "generator.async_generator": {name: GENERATION[name] for name in ("AsyncGenerator", "AsyncJob")},
    "generator.sampler": SAMPLERS,
    "generator.sampler.sampler": {"Sampler": SAMPLERS["Sampler"]},
    "generator.sampler.custom": {name: SAMPLERS[name] for name in SAMPLERS if name != "Sampler" and name not in _PRESETS},
    "generator.sampler.presets": {name: SAMPLERS[name] for name in _PRESETS},
    "generator.filter": FILTERS,
    "generator.filter.filter": {"Filter": FILTERS["Filter"]},
    "generator.filter.llguidance": {"LLGuidanceFilter": FILTERS["LLGuidanceFilter"], "llguidance_available": f"{_HERE}.other"},
    "generator.filter.formatron": {"FormatronFilter": FILTERS["FormatronFilter"]},
    "model": {**CONFIG, **MODEL},
    "model.config": CONFIG,
    "model.model": MODEL,
    "model.lora": {"LoRA": f"{_HERE}.other"},
    "loader": dict.fromkeys(("SafetensorsCollection", "VariantSafetensorsCollection"), f"{_HERE}.other"),
    "integration": {},
    "integration.transformers": {"__getattr__": f"{_HERE}.other"},
    "version": {},
    "constants": {},
    "util": {"Timer": f"{_HERE}.other"},
    "util.memory": {"free_mem": f"{_HERE}.other"},
}
_CONSTANTS: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION},
    "version": {"__version__": VERSION},
    "constants": {"PAGE_SIZE": 256, "MAX_MLP_INTERMEDIATE": 55296},
}


class _Distribution(importlib.metadata.Distribution):
    """What `importlib.metadata` says of exllamav3: programs ask it for the version."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: exllamav3\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return path


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Serves exllamav3, its submodules and its version."""

    def find_distributions(self, context: importlib.metadata.DistributionFinder.Context | None = None) -> Iterator[_Distribution]:
        name = getattr(context, "name", None)
        if name is None or name.lower() == "exllamav3":
            yield _Distribution()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top, _, inner = fullname.partition(".")
        if top != "exllamav3" or inner not in MODULES:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=__file__, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        inner = module.__name__.partition(".")[2]
        module.__doc__ = f"{module.__name__}, served by exl3."
        module.__dict__.update(_CONSTANTS.get(inner, {}))
        module.__dict__["__all__"] = [n for n in MODULES[inner] if not n.startswith("_")]
        if inner == "integration.transformers":
            from exl3.integrations.exllamav3.other import refuse_transformers

            refuse_transformers()


class _Module(types.ModuleType):
    """A module whose names are fetched on first use, submodules included."""

    def __getattr__(self, name: str) -> Any:
        inner = self.__name__.partition(".")[2]
        source = MODULES[inner].get(name)
        if source is not None and not name.startswith("_"):
            value = getattr(importlib.import_module(source), name)
        elif f"{inner}.{name}".lstrip(".") in MODULES:
            value = importlib.import_module(f"{self.__name__}.{name}")
        else:
            raise AttributeError(
                f"{self.__name__} has no {name!r} here: exl3 stands in for exllamav3 {VERSION} and does not offer this name"
            )
        self.__dict__[name] = value
        return value


_finder = _Finder()


def install() -> None:
    """From now on `import exllamav3` gives exl3's stand-in, whatever else is installed. Does nothing the second time."""
    if _finder in sys.meta_path:
        return
    foreign = sys.modules.get("exllamav3")
    if foreign is not None and not isinstance(foreign, _Module):
        raise ImportError("exllamav3 itself is imported already: call exl3.integrations.exllamav3.install() before the first import of it")
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Takes the stand-in away again (tests)."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name in [n for n, m in sys.modules.items() if isinstance(m, _Module)]:
        del sys.modules[name]
