"""The converter: from a Hugging Face model directory to an EXL3 one, block by block.

Reading order: options (what can be asked), allocate and recipe (which rate each matrix gets), calibration and selfgen (text), sensitivity
(what each matrix's error will cost), hessian (input statistics), regularize, scales, ldl, damping, ldlq, twosided, refit (the mathematics
of one matrix), linear (groups of matrices end to end), fitting (the same within a device's memory), streams, team, together (the same on
several devices), block (one decoder layer: capture, quantize, advance), head, job (work folder, lock, checkpoints), background, tune
(distillation at the end), retune (the same of a finished directory), compile (the output directory), convert (the whole).
"""
