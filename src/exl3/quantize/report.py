"""What a conversion did: one record per tensor and block, and the whole as JSON or a table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exl3.files.shards import write_json


@dataclass
class TensorReport:
    """One quantized matrix."""

    key: str
    bits: float
    shape: tuple[int, int]  # (in_features, out_features)
    proxy_error: float  # share of the output energy lost on calibration inputs
    weight_error: float  # share of the weight's energy lost
    scale: float  # RMS in codebook units
    scale_searched: bool
    out_scales: bool
    damping: float
    retries: int
    calibrated: bool
    seconds: float
    unreached: bool = False  # no calibration token was sent to it
    on_host: bool = False  # too large for the device: its algebra was done in host memory


@dataclass
class BlockReport:
    """One decoder block (or the head): error of its output relative to the original block on the same input, `rfn` = ||q - o|| / ||o||."""

    key: str
    rfn: float
    cosine_error: float
    seconds: float
    dead_channels: dict[str, list[int]] = field(default_factory=dict)
    wide: bool = False  # half precision overflowed: computed in fp32


@dataclass
class Report:
    """The result of `exl3.convert`."""

    output_dir: str
    bits: float = 0.0  # mean over the decoder's matrices, stored weights
    head_bits: float = 16
    total_bits: float = 0.0  # everything stored, per weight of the source model
    bytes: int = 0
    calibration: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    tensors: list[TensorReport] = field(default_factory=list)
    blocks: list[BlockReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def proxy_error(self) -> float:
        """Mean over calibrated tensors, weighted by size."""
        rows = [(t.proxy_error, t.shape[0] * t.shape[1]) for t in self.tensors if t.calibrated]
        total = sum(n for _, n in rows)
        return sum(e * n for e, n in rows) / total if total else 0.0

    @property
    def fallbacks(self) -> list[str]:
        """Tensors quantized without calibration."""
        return [t.key for t in self.tensors if not t.calibrated]

    @property
    def unreached(self) -> list[str]:
        """Tensors that no calibration token was sent to: experts that the router never chose."""
        return [t.key for t in self.tensors if t.unreached]

    @property
    def on_host(self) -> list[str]:
        """Tensors that did not fit the device and were worked on in host memory."""
        return [t.key for t in self.tensors if t.on_host]

    @property
    def retries(self) -> dict[str, int]:
        """Tensors whose Hessian needed more damping."""
        return {t.key: t.retries for t in self.tensors if t.retries}

    @property
    def wide(self) -> list[str]:
        """Blocks computed in fp32 because half precision overflowed."""
        return [b.key for b in self.blocks if b.wide]

    @property
    def dead_channels(self) -> dict[str, list[int]]:
        return {key: channels for b in self.blocks for key, channels in b.dead_channels.items()}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with the summaries above."""
        d = dataclasses.asdict(self)
        names = ("proxy_error", "fallbacks", "unreached", "on_host", "retries", "dead_channels", "wide")
        return d | {name: getattr(self, name) for name in names}

    def write(self, path: str | Path) -> None:
        """JSON, atomic."""
        write_json(path, self.as_dict())

    def summary(self) -> list[tuple[str, str]]:
        """Name and value for a table of the whole."""
        rows = [
            ("written to", self.output_dir),
            ("bits per weight", f"{self.bits:.2f} decoder, {self.head_bits:g} head, {self.total_bits:.2f} over everything stored"),
            ("size", f"{self.bytes / 2**20:.1f} MiB"),
            ("calibration", f"{self.calibration.get('rows', 0)} rows of {self.calibration.get('cols', 0)} tokens"),
            ("mean proxy error", f"{self.proxy_error:.6f}"),
            ("time", f"{self.seconds:.0f} s"),
        ]
        if self.fallbacks:
            rows.append(("not calibrated", f"{len(self.fallbacks)} tensors, first {self.fallbacks[0]}"))
        if self.unreached:
            rows.append(("unreached", f"{len(self.unreached)} tensors saw no calibration token, first {self.unreached[0]}"))
        if self.on_host:
            rows.append(("in host memory", f"{len(self.on_host)} tensors, first {self.on_host[0]}"))
        if self.wide:
            rows.append(("in fp32", f"{len(self.wide)} blocks in which half precision overflows, first {self.wide[0]}"))
        if self.retries:
            rows.append(("extra damping", f"{len(self.retries)} tensors, first {next(iter(self.retries))}"))
        if self.dead_channels:
            key, channels = next(iter(self.dead_channels.items()))
            rows.append(("dead inputs", f"{sum(map(len, self.dead_channels.values()))} channels, first {key}[{channels[0]}]"))
        return rows + [("warning", w) for w in self.warnings]

    @staticmethod
    def tensors_from(records: list[dict[str, Any]]) -> list[TensorReport]:
        return [TensorReport(**{**r, "shape": tuple(r["shape"])}) for r in records]

    @staticmethod
    def blocks_from(records: list[dict[str, Any]]) -> list[BlockReport]:
        return [BlockReport(**r) for r in records]
