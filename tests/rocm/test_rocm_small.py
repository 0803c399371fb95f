"""The small operations through libexl3_rocm: the tests of the portable kernels again, with this library behind their fixture `lib`."""

from test_portable import (  # noqa: F401
    _seed,
    test_act_mul,
    test_add_softcap,
    test_cache,
    test_dense,
    test_embedding,
    test_embedding_ring,
    test_reconstruct,
    test_rms_norm,
    test_rotary,
    test_rotary_table,
    test_rotate,
    test_sample,
    test_sample_ties_and_bad_rows,
)
