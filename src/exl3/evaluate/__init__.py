"""How far a quantized model is from its original: KL divergence, top-1 agreement, perplexity, size.

In reading order: `metrics` (numbers from two sets of logits), `rows` (text to token rows), `compare` (two directories),
`report` (a page for several directories), `mix` (the best of several quantizations of one model).
"""

from exl3.evaluate.compare import Comparison, compare
from exl3.evaluate.metrics import Accumulator, Summary
from exl3.evaluate.rows import text_rows

__all__ = ["Accumulator", "Comparison", "Summary", "compare", "text_rows"]
