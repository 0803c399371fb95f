"""`exl3 import-gguf FILE OUT_DIR`."""

from __future__ import annotations

import click

from exl3.cli.common import human_bytes


@click.command("import-gguf")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.argument("out_dir", type=click.Path(file_okay=False))
def command(file: str, out_dir: str) -> None:
    """Turn a GGUF file into a Hugging Face directory (weights dequantized, tokenizer rebuilt)."""
    from exl3.files import Checkpoint, import_gguf

    import_gguf(file, out_dir)
    ckpt = Checkpoint.open(out_dir)
    size = sum(t.nbytes for t in ckpt.tensors.values())
    click.echo(f"{out_dir}: {len(ckpt.tensors)} tensors, {human_bytes(size)}; dequantized from {file}, no better than it")
