"""Every option of a conversion in one place: defaults, presets, checks, and which of them a resumed job may change."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from exl3.codec.codebooks import CODEBOOKS
from exl3.codec.rings import RATES
from exl3.errors import ArgumentError, UnsupportedError

HEAD_RATES = (*RATES, 16)
EMBED_RATES = (1, 2, 3, 4, 5, 6, 7, 8, 16)
QUALITIES = ("fast", "default", "best")

# what may differ when a job is resumed: where things lie and how it runs, never what is written
CHANGEABLE = frozenset(
    {"input_dir", "output_dir", "work_dir", "shard_size", "devices", "device_ratios", "checkpoint_interval", "last_checkpoint_index",
     "max_module", "verbose", "parallel_mode", "resume"}
)  # fmt: skip

# for one run only: a resumed job starts from their defaults
MOMENTARY = frozenset({"max_module", "last_checkpoint_index"})

# wider matrices' outputs are coupled by matrices of hundreds of MiB, and cannot be shared by columns between devices
TWO_SIDED_OUTPUTS = 4096
MOST_DAMPING = 1000  # times the mean diagonal: next to it the Hessian says nothing, and far above it fp32 ends
CORRECTION = 0.5  # share of the error made upstream that targets make up for

# tokens of the reverse pass that measures sensitivity, by quality and device
_SENSITIVITY = {
    ("fast", "cpu"): 1024, ("default", "cpu"): 1024, ("best", "cpu"): 16384,
    ("fast", "gpu"): 16384, ("default", "gpu"): 65536, ("best", "gpu"): 262144,
}  # fmt: skip

# calibration (rows, tokens in a row) by quality, on a CPU and on a GPU
_CALIBRATION = {
    ("fast", "cpu"): (24, 512), ("default", "cpu"): (48, 512), ("best", "cpu"): (256, 1024),
    ("fast", "gpu"): (64, 2048), ("default", "gpu"): (128, 2048), ("best", "gpu"): (1000, 2048),
}  # fmt: skip


_CPU_WINDOW = 96  # seam window: seven tenths of the time for 0.7 to 1 % more error


@dataclass
class ConvertOptions:
    """Options of `exl3.convert`; the names are those of the command line (`exl3 convert --help`). None means: choose."""

    # what is written
    bits: float | None = None  # mean bits per weight of the decoder's matrices, head apart
    total_bits: float | None = None  # or: bits of everything stored per weight of the source model
    recipe: str | None = None  # or: a file with a rate for each tensor
    head_bits: float | None = None  # None: the recipe's, else 6
    embed_bits: int | None = None  # None: the recipe's, else 16, as it is
    hq: int = 0
    codebook: str = "mul1"
    half_rates: str = "auto"  # auto, always: 1.5, 2.5 and 3.5 may be chosen; never
    mtp_bits: float | None = None
    vision_bits: int = 0
    ngram_bits: int = 0
    ngram_file: str | None = None
    shard_size: int = 8192  # MiB; 0: one file
    # how well
    quality: str = "default"
    preset: str | None = None  # "incumbent"
    cal_data: str | None = None
    cal_rows: int | None = None
    cal_cols: int | None = None
    allocation: str | None = None  # bits by "sensitivity" (measured) or by "place" (kind of matrix and depth)
    channel_weighting: bool | None = None  # output scales by measured importance of the channels
    two_sided: bool | None = None  # errors are fed back over the outputs, too, by how the loss couples them; None: on a GPU, small models
    self_text: float | None = None  # share of the calibration rows that the model writes itself
    out_scales: str = "auto"
    scaled_hessian: bool | None = None  # the LDL factor sees the rows' scales
    damping: float | None = None  # share of the Hessian's mean diagonal
    choose_damping: bool | None = None  # multiples of it are tried on tokens held back
    recapture: bool | None = None  # inputs of a later group see the already quantized earlier ones of the same block
    correction: float | None = None  # share of the error made upstream that targets make up for, 0 ... 1
    token_weighting: bool | None = None  # attention-sink and outlier tokens count less
    seam_window: int | None = None
    tune: bool = False  # distil the original into scales and norms when all is quantized
    tune_steps: int | None = None
    seed: int = 0
    hessians: str | None = None
    hessians_one_sided: bool = False
    hessians_reg: float = 0.025
    # how it runs
    devices: str | None = None
    device_ratios: str = ""
    checkpoint_interval: float = 120.0  # seconds
    last_checkpoint_index: int = -1
    max_module: int | None = None
    resume: bool = False
    verbose: bool = False
    image_dump: bool = False
    parallel_mode: bool = False
    override_anyway: bool = False

    def checked(self) -> ConvertOptions:
        """A copy with presets applied and every value checked; ArgumentError or UnsupportedError otherwise."""
        o = dataclasses.replace(self)
        _check_types(o)
        _check_unsupported(o)
        _check_values(o)
        incumbent = o.preset == "incumbent"
        defaults: dict[str, Any] = {
            "head_bits": None if o.recipe else 6,
            "embed_bits": None if o.recipe else 16,
            "scaled_hessian": not incumbent,
            "damping": 0.025,
            "choose_damping": False,
            "recapture": not incumbent and o.quality != "fast",
            "correction": 0.0 if incumbent or o.quality == "fast" or o.recapture is False else CORRECTION,
            "allocation": "place" if incumbent or o.quality == "fast" else "sensitivity",
            "channel_weighting": not incumbent and o.quality != "fast",
            "self_text": 0.0,
            "token_weighting": False,
            "seam_window": 0 if incumbent or o.quality == "best" else 64 if o.quality == "fast" else None,  # None: by kind of device
        }
        if incumbent:
            defaults |= {"cal_rows": 250, "cal_cols": 2048}
        for name, value in defaults.items():
            if getattr(o, name) is None:
                setattr(o, name, value)
        return o

    def with_calibration(self, device_type: str) -> ConvertOptions:
        """A copy whose calibration size, and first pass of the search, are chosen for the kind of device."""
        window = 0 if device_type != "cpu" else _CPU_WINDOW
        rows, cols = _CALIBRATION[self.quality, "cpu" if device_type == "cpu" else "gpu"]
        seam = window if self.seam_window is None else self.seam_window
        return dataclasses.replace(self, cal_rows=self.cal_rows or rows, cal_cols=self.cal_cols or cols, seam_window=seam)

    def with_sides(self, device_type: str, widest: int) -> ConvertOptions:
        """A copy that knows whether errors are fed back over the outputs; `widest`: outputs of the model's widest matrix."""
        if self.two_sided is not None:
            return self
        measured = self.allocation == "sensitivity" and self.preset is None and self.quality != "fast"
        return dataclasses.replace(self, two_sided=measured and device_type != "cpu" and widest <= TWO_SIDED_OUTPUTS)

    def sensitivity_tokens(self, device_type: str) -> int:
        """Calibration tokens that the reverse pass looks at."""
        return _SENSITIVITY[self.quality, "cpu" if device_type == "cpu" else "gpu"]

    @property
    def wants_sensitivity(self) -> bool:
        """Whether the reverse pass is needed: for rates that no recipe fixes, or for the output scales."""
        return (
            (self.allocation == "sensitivity" and self.recipe is None)
            or (bool(self.channel_weighting) and self.out_scales == "auto")
            or bool(self.two_sided)
        )

    def fixed(self) -> dict[str, Any]:
        """The settings that decide the output's bytes: a resumed job must agree in all of them."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in CHANGEABLE}

    def head_rates_ok(self) -> None:
        bad_half = self.head_bits is not None and self.head_bits != int(self.head_bits) and self.codebook != "mul1"
        if self.head_bits is not None and (self.head_bits not in HEAD_RATES or bad_half):
            raise ArgumentError(f"head_bits is {self.head_bits:g}; use 1-8, 16, or with codebook mul1 also 1.5, 2.5, 3.5")

    def embed_rates_ok(self) -> None:
        if self.embed_bits is not None and self.embed_bits not in EMBED_RATES:
            raise ArgumentError(f"embed_bits is {self.embed_bits:g}; use 1-8, or 16 to leave the token embedding as it is")


def _check_unsupported(o: ConvertOptions) -> None:
    missing = {
        "mtp_bits": (o.mtp_bits is not None, "multi-token prediction heads are not quantized yet"),
        "vision_bits": (o.vision_bits != 0, "vision towers are not quantized yet"),
        "ngram_bits": (o.ngram_bits != 0, "hashed n-gram tables are not quantized yet"),
        "ngram_file": (o.ngram_file is not None, "hashed n-gram tables are not quantized yet"),
        "hessians": (o.hessians is not None, "external Hessian factors are not read yet"),
        "out_scales yaqa": (o.out_scales == "yaqa", "output scales from external Hessian factors are not computed yet"),
        "image_dump": (o.image_dump, "tensors are not dumped as images"),
    }
    for name, (asked, why) in missing.items():
        if asked:
            raise UnsupportedError(f"option {name}: {why}; leave the option out")


def _check_types(o: ConvertOptions) -> None:
    """Numbers are finite numbers, texts are text: nothing else may reach the arithmetic or the work folder."""
    for f in dataclasses.fields(o):
        value, hint = getattr(o, f.name), str(f.type)
        if value is None and "None" in hint:
            continue
        kind = hint.split(" ")[0]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "float" and not (number and math.isfinite(value)):
            raise ArgumentError(f"{f.name} is {value!r}; a finite number is needed")
        if kind == "int" and not (number and isinstance(value, int) and abs(value) < 1 << 63):
            raise ArgumentError(f"{f.name} is {value!r}; a whole number below 2**63 is needed")
        if kind == "str" and not isinstance(value, str):
            raise ArgumentError(f"{f.name} is {value!r}; text is needed")
        if kind == "bool" and not isinstance(value, bool):
            raise ArgumentError(f"{f.name} is {value!r}; True or False is needed")


def _check_values(o: ConvertOptions) -> None:
    given = [name for name in ("bits", "total_bits", "recipe") if getattr(o, name) is not None]
    if not given:
        raise ArgumentError("no target size: give bits (-b), total_bits (--total-bits) or a recipe (-rcp)")
    if o.total_bits is not None and len(given) > 1:
        raise ArgumentError(f"{' and '.join(given)} contradict each other; give one")
    for name in ("bits", "total_bits"):
        value = getattr(o, name)
        if value is not None and not 1 <= value <= (8 if name == "bits" else 16):
            raise ArgumentError(f"{name} is {value:g}; it must lie between 1 and {8 if name == 'bits' else 16}")
    _choice("codebook", o.codebook, CODEBOOKS)
    _choice("half_rates", o.half_rates, ("auto", "always", "never"))
    if o.half_rates == "always" and o.codebook != "mul1":
        raise ArgumentError(f"half_rates is 'always', and codebook {o.codebook} has whole rates alone; use codebook mul1, or leave it out")
    _choice("quality", o.quality, QUALITIES)
    _choice("out_scales", o.out_scales, ("auto", "always", "never"))
    if o.allocation is not None:
        _choice("allocation", o.allocation, ("sensitivity", "place"))
    if o.preset is not None:
        _choice("preset", o.preset, ("incumbent",))
    o.head_rates_ok()
    o.embed_rates_ok()
    minimum = {
        "hq": 0,
        "shard_size": 0,
        "cal_rows": 1,
        "cal_cols": 2,
        "tune_steps": 1,
        "checkpoint_interval": 0,
        "seam_window": 0,
        "damping": 0,
        "correction": 0,
        "self_text": 0,
        "max_module": 0,
        "last_checkpoint_index": -1,
    }
    for name, least in minimum.items():
        value = getattr(o, name)
        if value is not None and value < least:
            raise ArgumentError(f"{name} is {value}; it must be at least {least}")
    if o.seam_window is not None and (o.seam_window > 256 or o.seam_window % 2):
        raise ArgumentError(f"seam_window is {o.seam_window}; it must be even and at most 256, 0 for all positions")
    for name, most in {"correction": 1, "self_text": 1, "damping": MOST_DAMPING}.items():
        value = getattr(o, name)
        if value is not None and value > most:
            raise ArgumentError(f"{name} is {value:g}; it must lie between 0 and {most}")


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(f"{name} is {value!r}; use one of {', '.join(allowed)}")
