"""Numbers on a device: one function per native operation, the only door to native code.

In reading order: `reference` (the operations in plain torch: what each must compute), `blocks` and `native` (argument blocks, the
libraries), `checks`, `weight`, then the operations: `products`, `pointwise`, `attention`, `embedding`, `sampling`, `transfer`; `tape`
(recorded steps), `memory` and `selftest`. Every function checks its arguments, raises ArgumentError, runs reference.py where no native
library serves the device or a gradient is wanted, and records itself when a `Tape` is open.
"""

from exl3.ops.attention import attend, attention, cache_append, cache_read, sdpa
from exl3.ops.embedding import RingTable, embedding, take_rows
from exl3.ops.native import backend
from exl3.ops.pointwise import act_mul, add_, rms_norm, rotary_, rotary_table, softcap_
from exl3.ops.products import dense, encode, linear, rotate
from exl3.ops.sampling import SampleParams, pack_sample_params, sample
from exl3.ops.selftest import describe, self_test
from exl3.ops.tape import Tape
from exl3.ops.transfer import copy_, move, put
from exl3.ops.weight import Weight

__all__ = [
    "RingTable", "SampleParams", "Tape", "Weight", "act_mul", "add_", "attend", "attention", "backend", "cache_append", "cache_read",
    "copy_", "dense", "describe", "embedding", "encode", "linear", "move", "pack_sample_params", "put", "rms_norm", "rotary_",
    "rotary_table", "rotate", "sample", "sdpa", "self_test", "softcap_", "take_rows",
]  # fmt: skip
