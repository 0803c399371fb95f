"""A model directory: config, the union of all tensors, and the rules by which a module's tensors are found (spec section 1.4)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl3.errors import FormatError, MissingTensorError, UnsupportedError
from exl3.files.config import eos_ids, read_config, read_generation_config, tie_flag
from exl3.files.linears import FP8, HALF_RATES, MARKERS, LinearFiles, Piece, load_linears, pad128
from exl3.files.safetensors import TensorInfo, paused_gc, read_directory
from exl3.files.slabs import read_tensors

if TYPE_CHECKING:
    from exl3.files.tokenizer import Tokenizer

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *FP8)
_FOREIGN = {
    "qweight": "GPTQ or AWQ",
    "weight_packed": "compressed-tensors",
    "weight_scale_2": "NVFP4",
    "weight.absmax": "bitsandbytes",
    "weight_blocks": "MXFP4",
    "blocks": "MXFP4",
}
# beside a linear's own tensors, of no use here: activation and cache scales of fp8 recipes, obsolete or foreign remains
_BESIDE = ("input_scale", "k_scale", "v_scale", "scale", "weight", "su", "sv")
_IGNORED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class EmbeddingFiles:
    """Where a token embedding lies: kind "dense" (`weight`) or "ring" (2-D trellis shards and signs, spec 4.8).

    `rows`, `hidden` are the stored sizes (`hidden` padded to 256 for rings); `names` in reading order, shards first to last.
    """

    kind: str
    key: str
    names: tuple[str, ...]
    rows: int
    hidden: int
    bits: float
    K: int | None = None


@dataclass
class Checkpoint:
    """A checked model directory. Holds no file open and no tensor data; make one with `Checkpoint.open`."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    metadata: dict[Path, dict[str, str]]
    adapters: list[Path]
    _markers: dict[str, int] | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Parse and check config.json and every `*.safetensors` header in `path`, and the shapes of all EXL3 tensors.

        Reads no weights. Files that hold only a PEFT adapter are left out (`adapters`). Raises `MissingTensorError` (no such
        directory, no config, a shard of the index absent), `FormatError` (anything that contradicts itself or the format).
        """
        path = Path(path)
        with paused_gc():
            tensors, metadata, adapters = read_directory(path)
            checkpoint = cls(path, read_config(path), read_generation_config(path), tensors, metadata, adapters)
            for key in checkpoint.exl3_keys():
                checkpoint._exl3(key)
        return checkpoint

    @property
    def file_count(self) -> int:
        return len(self.metadata)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def is_exl3(self) -> bool:
        return any(True for _ in self.exl3_keys())

    def eos_ids(self, tokenizer: Tokenizer | None = None) -> list[int]:
        """All ids that end a sequence, from config.json, generation_config.json and the tokenizer: see `exl3.files.config.eos_ids`."""
        return eos_ids(self.config, self.generation_config, None if tokenizer is None else tokenizer.eos_id)

    def read(self, names: Iterable[str], device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """Tensors as stored (dtype and shape), 256-byte aligned. Raises `MissingTensorError`."""
        return read_tensors({name: self.info(name) for name in names}, device)

    def info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise MissingTensorError(f"{self.path}: tensor {name!r} is in none of the {self.file_count} files") from None

    def unused(self, used: Collection[str]) -> list[str]:
        """Names of stored tensors that are not in `used`, without tables every model recomputes (rotary frequencies, masks)."""
        used = set(used)
        return sorted(name for name in self.tensors if name not in used and not name.endswith(_IGNORED))

    # --------------------------------------------------------------------------------------------------------- linears

    def exl3_keys(self) -> Iterable[str]:
        """Module keys of all EXL3 matrices."""
        return (name[: -len(".trellis")] for name, t in self.tensors.items() if name.endswith(".trellis") and len(t.shape) == 3)

    def linear_keys(self) -> list[str]:
        """Module keys of all matrices: EXL3 ones, and dense 2-D `.weight` tensors that are neither embedding nor router."""
        keys = list(self.exl3_keys())
        found = set(keys)
        for name, t in self.tensors.items():
            key, _, suffix = name.rpartition(".")
            module = key.rpartition(".")[2]
            if (
                suffix == "weight"
                and len(t.shape) == 2
                and key not in found
                and "embed" not in module
                and module not in ("gate", "router", "wte")
            ):
                keys.append(key)
        return keys

    def has_linear(self, key: str) -> bool:
        """Whether there is an EXL3 or dense matrix under `key`."""
        return f"{key}.weight" in self.tensors or len(getattr(self.tensors.get(f"{key}.trellis"), "shape", ())) == 3

    def linear(
        self,
        key: str,
        alternative: str | None = None,
        *,
        fused: Sequence[tuple[str, int, int]] | None = None,
        shape: tuple[int, int] | None = None,
    ) -> LinearFiles:
        """Find the matrix of module `key`: EXL3 under `key`, EXL3 under `alternative`, dense under `key`, dense under `alternative`.

        `fused` says where a dense `key` lies when the source has no tensor of that name: a list of (source key, first row, rows)
        that are put one under the other. For a Phi-3 q_proj of n rows: `fused=[("...qkv_proj", 0, n)]`.
        `shape` is the true (out_features, in_features); stored sizes must equal it or be padded from it to multiples of 128.
        Raises `MissingTensorError`, `FormatError` (sizes, dtypes), `UnsupportedError` (a foreign quantization).
        """
        for k in filter(None, (key, alternative)):
            trellis = self.tensors.get(f"{k}.trellis")
            if trellis is not None and len(trellis.shape) == 3:
                return self._sized(self._with_multiplier(self._exl3(k)), shape)
        dense = self._dense(key) or (fused and self._fused(key, fused)) or (alternative and self._dense(alternative))
        if dense:
            return self._sized(dense, shape)
        for k in filter(None, (key, alternative, *(source for source, _, _ in fused or ()))):
            for suffix, scheme in _FOREIGN.items():
                if f"{k}.{suffix}" in self.tensors:
                    raise UnsupportedError(
                        f"{self.path}: {k} is quantized by {scheme}, which is not read; use the unquantized (or fp8) model"
                    )
        where = " or ".join(repr(k) for k in (key, alternative) if k)
        raise MissingTensorError(f"{self.path}: no matrix {where} (neither .trellis nor .weight) in any of the {self.file_count} files")

    def _exl3(self, key: str) -> LinearFiles:
        """The EXL3 matrix under `key`, all shapes and dtypes checked, its multiplier not yet read."""
        tensors = self.tensors
        trellis = tensors[f"{key}.trellis"]
        where = f"{trellis.file}: {key}"
        if trellis.dtype != torch.int16:
            raise FormatError(f"{where}.trellis has dtype {trellis.dtype}, the format has int16")
        kt, nt, width = trellis.shape
        n_in, n_out = 16 * kt, 16 * nt
        if not n_in or not n_out or n_in % 128 or n_out % 128:
            raise FormatError(f"{where}.trellis has shape {list(trellis.shape)}: {n_in} x {n_out} is not in blocks of 128")
        names = {"trellis": f"{key}.trellis"}
        for full, packed, n in (("suh", "su", n_in), ("svh", "sv", n_out)):
            if f"{key}.{full}" in tensors:
                self._check(key, full, torch.float16, n)
                names[full] = f"{key}.{full}"
            elif f"{key}.{packed}" in tensors:
                self._check(key, packed, torch.int16, n // 16)
                names[packed] = f"{key}.{packed}"
            else:
                raise MissingTensorError(f"{where}.trellis is there but {key}.{full} is in none of the files")
        markers = [marker for marker in MARKERS if f"{key}.{marker}" in tensors]
        if len(markers) == 2:
            raise FormatError(f"{where} has both codebook markers, .mcg and .mul1; the file is damaged")
        for marker in markers:
            info = tensors[f"{key}.{marker}"]
            if info.dtype not in (torch.int32, torch.uint32) or info.numel != 1:
                raise FormatError(f"{where}.{marker} is {info.dtype} of shape {list(info.shape)}, the format has one int32")
            names[marker] = f"{key}.{marker}"
        if f"{key}.bias" in tensors:
            info = tensors[f"{key}.bias"]
            if info.dtype not in _FLOATS or len(info.shape) != 1 or pad128(info.shape[0]) != n_out:
                raise FormatError(f"{where}.bias is {info.dtype} of shape {list(info.shape)}, the matrix has {n_out} outputs")
            names["bias"] = f"{key}.bias"
        codebook = markers[0] if markers else "3inst"
        if width % 16 == 0 and 16 <= width <= 128:
            K: int | float = width // 16
        elif width in HALF_RATES and codebook == "mul1":
            K = width / 16
        else:
            rule = "1.5, 2.5 and 3.5 need the mul1 codebook" if width in HALF_RATES else "rates are 1 to 8, or 1.5, 2.5, 3.5 with mul1"
            raise FormatError(f"{where}.trellis is {width} words wide, K = {width / 16:g} with codebook {codebook}: {rule}")
        covers = (*names.values(), *(n for n in (f"{key}.{s}" for s in _BESIDE) if n in tensors))
        infos = {role: tensors[name] for role, name in names.items()}
        return LinearFiles("exl3", key, names, n_in, n_out, n_in, n_out, float(K), K, codebook, None, covers, infos=infos)

    def _check(self, key: str, suffix: str, dtype: torch.dtype, n: int) -> None:
        info = self.tensors[f"{key}.{suffix}"]
        if info.dtype != dtype or info.shape != (n,):
            raise FormatError(
                f"{info.file}: {key}.{suffix} is {info.dtype} of shape {list(info.shape)}, its trellis needs {dtype} of shape [{n}]"
            )

    def _with_multiplier(self, linear: LinearFiles) -> LinearFiles:
        marker = linear.names.get(linear.codebook or "")
        return linear if marker is None else replace(linear, multiplier=self.multipliers()[marker])

    def multipliers(self) -> dict[str, int]:
        """The values of all codebook markers, tensor name -> unsigned 32-bit multiplier; read once, together."""
        if self._markers is None:
            names = [f"{key}.{m}" for key in self.exl3_keys() for m in MARKERS if f"{key}.{m}" in self.tensors]
            self._markers = {name: int(t.view(torch.int32).item()) & 0xFFFFFFFF for name, t in self.read(names).items()}
        return self._markers

    def _dense(self, key: str) -> LinearFiles | None:
        if f"{key}.weight" not in self.tensors:
            return None
        piece = self._piece(key, 0, None)
        out_features, in_features = piece.weight.shape
        return self._dense_files(key, [piece], out_features, in_features)

    def _fused(self, key: str, fused: Sequence[tuple[str, int, int]]) -> LinearFiles | None:
        if not all(f"{source}.weight" in self.tensors for source, _, _ in fused):
            return None
        pieces = [self._piece(source, start, rows) for source, start, rows in fused]
        widths = {piece.weight.shape[1] for piece in pieces}
        if len(widths) != 1 or len({piece.bias is None for piece in pieces}) != 1:
            raise FormatError(f"{self.path}: the sources of {key} do not fit together: {[p.key for p in pieces]}")
        return self._dense_files(key, pieces, sum(piece.rows for piece in pieces), widths.pop())

    def _dense_files(self, key: str, pieces: list[Piece], out_features: int, in_features: int) -> LinearFiles:
        names: dict[str, str] = {}
        covers: list[str] = []
        for piece in pieces:
            own = {"weight": f"{piece.key}.weight"}
            if piece.bias is not None:
                own["bias"] = f"{piece.key}.bias"
            if piece.scale is not None:
                own["scale"] = next(n for n in self._scale_names(piece.key) if n in self.tensors)
            names = names or own
            covers += [*own.values(), *(n for n in (f"{piece.key}.{s}" for s in _BESIDE) if n in self.tensors)]
        bits = 8.0 * pieces[0].weight.dtype.itemsize
        return LinearFiles(
            "dense", key, names, in_features, out_features, in_features, out_features, bits, covers=tuple(covers), pieces=tuple(pieces)
        )

    @staticmethod
    def _scale_names(key: str) -> tuple[str, ...]:
        return f"{key}.weight_scale_inv", f"{key}.weight_scale", f"{key}.scale"

    def _piece(self, key: str, start: int, rows: int | None) -> Piece:
        """Rows of a dense source; raises `FormatError` unless it is a float matrix that has them, with scales when it is fp8."""
        weight = self.tensors[f"{key}.weight"]
        where = f"{weight.file}: {key}.weight"
        if len(weight.shape) != 2:
            raise FormatError(f"{where} has shape {list(weight.shape)}, a matrix has two dimensions")
        if weight.dtype not in _FLOATS:
            foreign = next((scheme for suffix, scheme in _FOREIGN.items() if f"{key}.{suffix}" in self.tensors), None)
            kind = f"quantized by {foreign}" if foreign else f"of dtype {weight.dtype}"
            raise UnsupportedError(f"{where} is {kind}; sources may be fp16, bf16, fp32 or fp8")
        rows = weight.shape[0] if rows is None else rows
        if not 0 <= start <= start + rows <= weight.shape[0]:
            raise FormatError(f"{where} has {weight.shape[0]} rows, {start} to {start + rows} are asked for; config.json does not fit it")
        scale = None
        if weight.dtype in FP8:
            scale = next((self.tensors[n] for n in self._scale_names(key) if n in self.tensors), None)
            if scale is None:
                raise MissingTensorError(f"{where} is fp8 but has no weight_scale_inv or weight_scale beside it")
        bias = self.tensors.get(f"{key}.bias")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise FormatError(f"{bias.file}: {key}.bias has shape {list(bias.shape)}, its matrix has {weight.shape[0]} rows")
        return Piece(key, start, rows, weight, scale, bias)

    def _sized(self, linear: LinearFiles, shape: tuple[int, int] | None) -> LinearFiles:
        """`linear` with its true sizes, which its stored ones must fit."""
        if shape is None:
            return linear
        stored = (linear.out_padded, linear.in_padded)
        exact_or_padded = all(
            have in ((want, pad128(want)) if linear.kind == "dense" else (pad128(want),)) for have, want in zip(stored, shape)
        )
        if not exact_or_padded:
            raise FormatError(
                f"{self.path}: {linear.key} is stored as {stored[0]} x {stored[1]} (out x in), config.json says {shape[0]} x {shape[1]}"
            )
        return replace(linear, out_features=shape[0], in_features=shape[1])

    def load_linears(
        self,
        linears: Mapping[str, LinearFiles],
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        *,
        check: bool = False,
    ) -> dict[str, dict[str, Tensor]]:
        """Read matrices found by `linear`: see `exl3.files.linears.load_linears`."""
        return load_linears(linears, device, dtype, check=check)

    # ---------------------------------------------------------------------------------------------- embedding and head

    def embedding(self, key: str) -> EmbeddingFiles:
        """The token embedding under `key`, dense or ring-quantized."""
        if f"{key}.weight" in self.tensors:
            t = self.tensors[f"{key}.weight"]
            if len(t.shape) != 2 or t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
                raise FormatError(f"{t.file}: {key}.weight is {t.dtype} of shape {list(t.shape)}, an embedding is a float matrix")
            return EmbeddingFiles("dense", key, (f"{key}.weight",), *t.shape, 8.0 * t.dtype.itemsize)
        names = [f"{key}.trellis"] if f"{key}.trellis" in self.tensors else []
        while f"{key}.shard_{len(names)}.trellis" in self.tensors:
            names.append(f"{key}.shard_{len(names)}.trellis")
        if not names:
            raise MissingTensorError(
                f"{self.path}: no embedding {key!r} (neither .weight nor .trellis) in any of the {self.file_count} files"
            )
        signs = self.info(f"{key}.signs")
        shards = [self.tensors[n] for n in names]
        groups = signs.shape[0] if signs.dtype == torch.float16 and len(signs.shape) == 2 and signs.shape[1] == 256 else 0
        words = shards[0].shape[-1] if groups else 0
        k, rest = divmod(words // groups - 1, 16) if groups and words % groups == 0 else (0, 1)
        same = all(t.dtype == torch.int16 and len(t.shape) == 2 and t.shape[1] == words for t in shards)
        if rest or not 1 <= k <= 8 or not same:
            raise FormatError(
                f"{shards[0].file}: {names[0]} {list(shards[0].shape)} and {key}.signs {list(signs.shape)} are no ring-quantized table"
            )
        return EmbeddingFiles("ring", key, (*names, f"{key}.signs"), sum(t.shape[0] for t in shards), 256 * groups, k + 1 / 16, k)

    def head(
        self, key: str, embedding: str, *, tied: bool | None = None, alternative: str | None = None, shape: tuple[int, int] | None = None
    ) -> LinearFiles:
        """The output head. The rule: stored head tensors win over every flag; without any, the embedding table is the head.

        `tied` is what the configuration says (default: `tie_word_embeddings`, nested or not; pass a family's own default).
        Warns when a dense head differs from the embedding though the flag says tied, and when there is no head though the flag
        does not say so. A dense head that equals the embedding byte for byte counts as tied, so that it is held once.
        """
        tied = tie_flag(self.config) if tied is None else tied
        if self.has_linear(key) or (alternative and self.has_linear(alternative)):
            head = self.linear(key, alternative, shape=shape)
            if tied and head.kind == "dense" and f"{embedding}.weight" in self.tensors:
                if self._same_bytes(head.names["weight"], f"{embedding}.weight"):
                    if "bias" not in head.names:
                        return replace(self.linear(embedding, shape=shape), tied=True, covers=(*head.covers, f"{embedding}.weight"))
                    return head
                warnings.warn(
                    f"{self.path}: tie_word_embeddings is true but {head.key} differs from {embedding}; the head is used", stacklevel=2
                )
            return head
        table = self.embedding(embedding)
        if table.kind == "ring":
            raise MissingTensorError(f"{self.path}: no head {key!r}, and a ring-quantized embedding cannot serve as one")
        if not tied:
            says = "tie_word_embeddings is false" if tied is False else "config.json does not say whether the head is tied"
            warnings.warn(f"{self.path}: {says} but there is no tensor {key!r}; the embedding is used as the head", stacklevel=2)
        return replace(self.linear(embedding, shape=shape), tied=True)

    def _same_bytes(self, a: str, b: str) -> bool:
        x, y = self.tensors[a], self.tensors[b]
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            return False
        step = max(1, (32 << 20) // max(1, x.nbytes // max(1, x.shape[0])))
        for start in range(0, x.shape[0], step):
            rows = min(step, x.shape[0] - start)
            pair = read_tensors({"a": x.rows(start, rows), "b": y.rows(start, rows)})
            if not torch.equal(pair["a"].view(torch.uint8), pair["b"].view(torch.uint8)):
                return False
        return True
