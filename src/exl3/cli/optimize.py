"""`exl3 optimize -m FILE -b BPW -o DIR`."""

from __future__ import annotations

import click

from exl3.cli.common import table


@click.command("optimize")
@click.option(
    *("-m", "--measurement", "path"),
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="file written by `exl3 measure`",
)
@click.option("-b", "--bits", type=float, required=True, help="mean bits per weight of the decoder's matrices, head apart")
@click.option("-o", "--out-dir", "--out_dir", "output", required=True, type=click.Path(file_okay=False), help="where the mixture goes")
@click.option("-ss", "--shard-size", "--shard_size", type=float, default=8192, show_default=True, help="largest shard in MiB, 0: one file")
def command(path: str, bits: float, output: str, shard_size: float) -> None:
    """Mix finished quantizations by a measurement: least predicted KL within BITS, nothing is quantized again."""
    from exl3.evaluate.mix import Measurement, choose, write_mix

    found = Measurement.read(path)
    chosen = choose(found, bits)
    gain = sum(g.kl[q] - found.base_kl for g, q in zip(found.groups, chosen))
    result = write_mix(found, chosen, output, shard_size=shard_size)
    counts = [f"{chosen.count(q)} of {len(chosen)} groups from {name}" for q, name in enumerate(found.quants)]
    rows = [("written to", str(result.path)), ("predicted mean KL", f"{found.base_kl + gain:.6f} (base {found.base_kl:.6f})")]
    table(rows + [("taken", c) for c in counts])
