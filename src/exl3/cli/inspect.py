"""`exl3 inspect DIR`: what a directory holds, from headers alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from exl3.cli.common import emit_json, human_bytes, json_flag, table


@click.command("inspect")
@click.argument("directory", type=click.Path(exists=True, file_okay=False))
@click.option("--tensors", is_flag=True, help="list every linear layer")
@json_flag
def command(directory: str, tensors: bool, as_json: bool) -> None:
    """Architecture, sizes, rates and codebooks of a model directory. Reads headers, no weights."""
    from exl3.evaluate.compare import storage
    from exl3.files import Checkpoint

    ckpt = Checkpoint.open(directory)
    linears = {key: ckpt.linear(key) for key in ckpt.linear_keys()}
    size = storage(ckpt)
    quantized = [x for x in linears.values() if x.kind == "exl3"]
    result: dict[str, Any] = {
        "architecture": (ckpt.config.get("architectures") or ["unknown"])[0],
        "files": ckpt.file_count,
        "tensors": len(ckpt.tensors),
        **size,
        "linears": len(linears),
        "exl3_linears": len(quantized),
        "rates": {f"{bits:g}": n for bits, n in sorted(Counter(float(x.bits) for x in linears.values()).items())},
        "codebooks": dict(Counter(x.codebook for x in quantized)),
    }
    if tensors:
        result["layers"] = {
            key: {"kind": x.kind, "bits": float(x.bits), "codebook": x.codebook, "in": x.in_padded, "out": x.out_padded}
            for key, x in linears.items()
        }
    if as_json:
        emit_json(result)
        return
    rates = ", ".join(f"{n} at {bits}" for bits, n in result["rates"].items())
    table(
        [
            ("architecture", result["architecture"]),
            ("stored", f"{human_bytes(size['bytes'])} in {result['files']} files, {result['tensors']} tensors"),
            ("linear layers", f"{len(linears)}, {len(quantized)} of them EXL3"),
            (
                "bits per weight",
                f"{size['bits_per_weight']:.3f}"
                + (f", head {size['head_bits']:g}" if size["head_bits"] else ", head tied to the embedding"),
            ),
            ("layers by rate", rates),
            ("codebooks", ", ".join(f"{k}: {n}" for k, n in result["codebooks"].items()) or "none"),
        ]
    )
    for key, layer in result.get("layers", {}).items():
        click.echo(f"{key}  {layer['kind']}  {layer['bits']:g} bits  {layer['codebook'] or '-'}  {layer['in']}x{layer['out']}")
