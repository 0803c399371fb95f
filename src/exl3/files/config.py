"""The JSON files beside the weights: config.json, generation_config.json, quantization_config.json, both ways (spec sections 1.2, 1.3)."""

from __future__ import annotations

import copy
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from exl3 import __version__
from exl3.errors import ArgumentError, FormatError, MissingTensorError, UnsupportedError
from exl3.files.safetensors import TensorInfo, is_adapter, parse_json, read_header
from exl3.files.shards import write_json

_JSON_LIMIT = 1 << 30  # bytes; the largest tokenizer.json in the field has some tens of MB
_OWN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")  # what ShardWriter writes and replaces
_NESTED = ("text_config", "llm_config", "language_config")
_COPY_NOT = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz"}


def read_json(path: str | os.PathLike[str], *, missing_ok: bool = False) -> dict[str, Any] | None:
    """The JSON object in `path`; None when it is absent and may be. Raises `FormatError` for anything but an object."""
    path = Path(path)
    if missing_ok and not path.exists():
        return None
    try:
        if not path.is_file():
            raise FormatError(f"{path}: absent or not a regular file")
        if path.stat().st_size > _JSON_LIMIT:
            raise FormatError(f"{path}: {path.stat().st_size} bytes, too large for a JSON file of a model")
        value = parse_json(path.read_bytes(), str(path))
    except OSError as e:
        raise FormatError(f"{path}: cannot be read ({e.strerror or e})") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """`config.json` of a model directory. Raises `MissingTensorError` when it is absent, `FormatError` when it is broken."""
    config = read_json(Path(directory) / "config.json", missing_ok=True)
    if config is None:
        raise MissingTensorError(f"{directory}: no config.json, so this is no Hugging Face model directory")
    return config


def read_generation_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """`generation_config.json`, or an empty dict."""
    return read_json(Path(directory) / "generation_config.json", missing_ok=True) or {}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's own settings: a nested `text_config` over the top level's, or the config itself."""
    for key in _NESTED:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            return {**{k: v for k, v in config.items() if k != key}, **nested}
    return dict(config)


def architecture(config: Mapping[str, Any]) -> str:
    """The one entry of `architectures`. Raises `UnsupportedError` when there is none or more than one."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UnsupportedError(f"config.json must name one architecture, it has architectures = {str(names)[:100]}")
    return names[0]


def tie_flag(config: Mapping[str, Any]) -> bool | None:
    """`tie_word_embeddings` of the text model, nested or not; None when nobody says."""
    value = text_config(config).get("tie_word_embeddings")
    return value if isinstance(value, bool) else None


def eos_ids(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_eos: int | None = None,
    vocab_size: int | None = None,
) -> list[int]:
    """All ids that end a sequence: the union of config.json's (top level and nested), generation_config.json's and the tokenizer's.

    A model stops too late when only one source is believed (the lists differ in many published models), never too early by
    believing all. None is dropped; an id outside the vocabulary is dropped with a warning.
    """
    sources: list[Any] = [config.get("eos_token_id"), text_config(config).get("eos_token_id")]
    sources += [(generation_config or {}).get("eos_token_id"), tokenizer_eos]
    size = vocab_size if vocab_size is not None else text_config(config).get("vocab_size")
    found: list[int] = []
    for source in sources:
        for value in source if isinstance(source, list) else [source]:
            if value is None or value in found:
                continue
            if type(value) is not int or value < 0 or (type(size) is int and value >= size):
                warnings.warn(f"end-of-sequence id {value!r} is not in the vocabulary of {size} tokens and is ignored", stacklevel=2)
            else:
                found.append(value)
    return found


# ----------------------------------------------------------------------------------------------------- quantization_config


def quantization_config(
    *,
    bits: float,
    head_bits: float,
    codebook: str,
    calibration: Mapping[str, Any] | None = None,
    out_scales: str = "auto",
    mtp_bits: float | None = None,
    vision_bits: int | None = None,
    original: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The block that marks a model as EXL3 (spec 1.2), in the incumbent's fields and order.

    `bits` is the average rate of the decoder's linears without the head, rounded to two decimals here; `head_bits` 16 means an
    unquantized head; `calibration` is {rows, cols} and, if known, {sources: rows of each text}; `original` the source's own
    quantization_config, kept for the record.
    """
    block: dict[str, Any] = {
        "quant_method": "exl3",
        "version": __version__,
        "bits": _number(round(bits, 2)),
        "head_bits": _number(head_bits),
    }
    if calibration is not None:
        block["calibration"] = {"rows": int(calibration["rows"]), "cols": int(calibration["cols"])}
        if sources := {str(name): int(rows) for name, rows in calibration.get("sources", {}).items() if rows}:
            block["calibration"]["sources"] = sources
    block |= {"out_scales": out_scales, "codebook": codebook}
    if mtp_bits is not None:
        block["mtp_bits"] = _number(mtp_bits)
    if vision_bits is not None:
        block["vision_bits"] = vision_bits
    if original:
        block["original_quantization_config"] = dict(original)
    return block


def _number(x: float) -> int | float:
    return int(x) if float(x).is_integer() else float(x)


def tensor_storage(tensors: Mapping[str, TensorInfo], multipliers: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The `tensor_storage` map of quantization_config.json (spec 1.3) for a directory's tensors.

    `multipliers` gives the value of each marker tensor by name, unsigned; a marker without one is left out.
    """
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        modules.setdefault(name.rpartition(".")[0], {})[name] = info
    storage: dict[str, Any] = {}
    for key in sorted(modules):
        entry: dict[str, Any] = {
            "stored_tensors": {n: {"shape": list(t.shape), "n_bytes": t.nbytes, "dtype": str(t.dtype)} for n, t in modules[key].items()}
        }
        trellis = modules[key].get(f"{key}.trellis")
        if trellis is not None and len(trellis.shape) == 3:
            entry["quant_format"] = "exl3"
            entry["bits_per_weight"] = _number(trellis.shape[2] / 16)
            for marker in ("mcg", "mul1"):
                value = (multipliers or {}).get(f"{key}.{marker}")
                if value is not None:
                    entry[f"{marker}_multiplier"] = value & 0xFFFFFFFF
        storage[key] = entry
    return storage


def write_config(
    directory: str | os.PathLike[str], source: Mapping[str, Any], quantization: Mapping[str, Any] | None, *, has_head: bool
) -> None:
    """Write config.json: the source's with `quantization_config` replaced.

    `has_head`: the directory holds its own output head, so `tie_word_embeddings` is set to false wherever it stood (and at the
    top, since several families tie by default). An EXL3 source's old block gives way, any other is kept inside the new one.
    """
    config = copy.deepcopy(dict(source))
    old = config.pop("quantization_config", None)
    if quantization is not None:
        block = dict(quantization)
        if isinstance(old, Mapping) and old.get("quant_method") != "exl3":
            block.setdefault("original_quantization_config", dict(old))
        config["quantization_config"] = block
    if has_head:
        config["tie_word_embeddings"] = False
        for key in _NESTED:
            if isinstance(config.get(key), dict):
                config[key]["tie_word_embeddings"] = False
    write_json(Path(directory) / "config.json", config)


def write_quantization_config(directory: str | os.PathLike[str], quantization: Mapping[str, Any], storage: Mapping[str, Any]) -> None:
    """Write quantization_config.json: the block of config.json plus `tensor_storage`."""
    write_json(Path(directory) / "quantization_config.json", {**quantization, "tensor_storage": storage})


def copy_companions(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[str]:
    """Copy what belongs to a model beside its weights (tokenizer, templates, licences); no weights, index or config. Returns names."""
    skip = {"config.json", "quantization_config.json"}
    copied = []
    for path in sorted(Path(source).iterdir()):
        weights = path.suffix in _COPY_NOT or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name not in skip and not path.name.startswith("."):
            shutil.copyfile(path, Path(target) / path.name)
            copied.append(path.name)
    return copied


def check_target(directory: str | os.PathLike[str], what: str = "output_dir", *, replace: bool = True) -> None:
    """ArgumentError for a directory that a model must not be written to: it holds one that is not EXL3 and would be lost, or weight files
    that would be read as part of the new one. An EXL3 model is replaced, unless `replace` is False."""
    folder = Path(directory)
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("."))
    for path in files:
        if not _OWN.fullmatch(path.name) and not _adapter(path):
            raise ArgumentError(f"{what} {folder}: holds {path.name}, which would be read as part of the model; choose another directory")
    if files and (folder / "config.json").exists():
        try:
            block = read_config(folder).get("quantization_config")
        except FormatError:
            block = None
        if not replace:
            raise ArgumentError(f"{what} {folder}: holds a model, which would be lost; choose another directory")
        if not (isinstance(block, Mapping) and block.get("quant_method") == "exl3"):
            raise ArgumentError(f"{what} {folder}: holds a model that is not EXL3 and would be lost; choose another directory")


def _adapter(path: Path) -> bool:
    try:
        return is_adapter(read_header(path).tensors)
    except (FormatError, OSError):
        return False


def first(config: Mapping[str, Any], keys: Iterable[str], default: Any = None) -> Any:
    """The value of the first of `keys` that is there and not null."""
    return next((config[key] for key in keys if config.get(key) is not None), default)
