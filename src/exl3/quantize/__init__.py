"""The converter: from a Hugging Face model directory to an EXL3 one, block by block.

Reading order: options (what can be asked), allocate and recipe (which rate each matrix gets), calibration (text), hessian (input
statistics), regularize, scales, ldl, ldlq, refit (the mathematics of one matrix), linear (one group of matrices end to end), block (one
decoder layer: capture, quantize, advance), job (work folder, lock, checkpoints), compile (the output directory), convert (the whole).
"""
