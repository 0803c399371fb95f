"""The arithmetic of the EXL3 format in plain torch: the executable specification and the oracle of all tests.

Files in reading order: rings (states, pack, unpack), tiles (stream order), codebooks, rotation, weights (decode,
dequantize), signs (legacy), search (the encoder), embedding (table rows), kvcache (key/value codes). docs/format.md
tells the same in prose. Everything works on any torch device and depends on nothing else of exl3 but its errors.
"""

from exl3.codec.codebooks import CODEBOOKS, MULTIPLIERS, codebook_rms, codebook_table
from exl3.codec.embedding import (
    embedding_decode,
    embedding_encode,
    embedding_rate,
    encode_rings,
    ngram_decode,
    ngram_rows,
    pack_rings,
    unpack_rings,
)
from exl3.codec.kvcache import bit_planes, kv_dequantize, kv_quantize
from exl3.codec.rings import RATES, check_rate, fresh_bits, is_tail_biting, pack, rate_of_width, unpack
from exl3.codec.rotation import hadamard, rotate, walsh
from exl3.codec.search import encode_reference
from exl3.codec.signs import pack_signs, unpack_signs
from exl3.codec.tiles import matrix_to_tiles, tile_coordinates, tiles_to_matrix
from exl3.codec.weights import decode, dequantize

__all__ = [
    "CODEBOOKS",
    "MULTIPLIERS",
    "RATES",
    "bit_planes",
    "check_rate",
    "codebook_rms",
    "codebook_table",
    "decode",
    "dequantize",
    "embedding_decode",
    "embedding_encode",
    "embedding_rate",
    "encode_reference",
    "encode_rings",
    "fresh_bits",
    "hadamard",
    "is_tail_biting",
    "kv_dequantize",
    "kv_quantize",
    "matrix_to_tiles",
    "ngram_decode",
    "ngram_rows",
    "pack",
    "pack_rings",
    "pack_signs",
    "rate_of_width",
    "rotate",
    "tile_coordinates",
    "tiles_to_matrix",
    "unpack",
    "unpack_rings",
    "unpack_signs",
    "walsh",
]
