"""The argument blocks of cpp/include/exl3/ops.h as struct formats, one line an operation, fields in the header's order.

`native` compares every size with the library's when it is opened, so a header that moved on refuses by name.
P pointer, q int64, i int32, I uint32, f float, Q uint64; native alignment, padded to 8 bytes at the end.
"""

from __future__ import annotations

from struct import Struct

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu2": 4, "xielu": 5, "relu": 6}

_CACHE = "4P5if"  # k v k_scale v_scale; pages kv_heads head_dim k_bits v_bits compand

WEIGHT = Struct("@4P2i2i2iIi0q")  # trellis suh svh bias; in out in_padded out_padded k2 codebook multiplier layout
LINEAR = Struct(
    "@2P4P4Pq4qPqf2i2i4i0q"
)  # x norm weights[4] y[4] x_stride y_stride[4] workspace bytes eps rows count dtypes planes shared act accumulate
DENSE = Struct("@4P2q3i3ii0q")  # x weight bias y; strides; rows in out; x weight y dtype; accumulate
REPACK = Struct("@2P")  # weight out
RECONSTRUCT = Struct("@2P2i")  # weight out dtype original_basis
ROTATE = Struct("@4P2q3i2i0q")  # x y pre post; strides; rows n n_padded; dtypes
RMS_NORM = Struct("@4P3q2i2if2i0q")  # x residual weight y; strides; rows n; dtypes; eps; subtract_mean accumulate
ROTARY_TABLE = Struct("@7P3i2f0q")  # positions token_row lengths inv_freq inv_freq_long cos sin; tokens half threshold; scale scale_long
ROTARY = Struct("@6P2q5i2if0q")  # q k cos sin q_norm k_norm; strides; tokens q_heads k_heads head_dim rotary_dim; dtype interleaved eps
CACHE_APPEND = Struct(f"@{_CACHE}2P2q3P3i0q")  # cache; k v; strides; positions token_row block_table; tokens table_stride dtype
ATTENTION = Struct(
    f"@{_CACHE}2P2q3PPPq4i2fi0q"
)  # cache; q y; strides; indices; sinks workspace bytes; tokens heads table_stride dtype; scale softcap window
ATTEND = Struct(f"@{ATTENTION.format[1:]}2P2q4P2if0q")  # attention; k v; strides; cos sin q_norm k_norm; rotary_dim interleaved eps
CACHE_READ = Struct(f"@{_CACHE}3P3i0q")  # cache; k v block_table; start count dtype
ACT_MUL = Struct("@3P3q4i4f")  # gate up y; strides; rows n dtype activation; params
EMBEDDING = Struct("@4Pq3i3if0q")  # ids table signs y; y_stride; tokens n vocab; table_dtype y_dtype trellis_bits; scale
ADD = Struct("@2Pqif")  # x y n x_dtype scale
SOFTCAP = Struct("@Pq2f")  # x n scale cap
SAMPLE = Struct("@PqPPqPPPPq2i")  # logits stride params history stride history_len ids probs workspace bytes rows vocab
ENCODE = Struct("@4Pq3iIi0q")  # tiles states values workspace bytes; count k2 codebook multiplier seam_window

SIZES = {name.lower(): block.size for name, block in list(globals().items()) if isinstance(block, Struct)}
