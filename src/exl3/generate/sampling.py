"""Sampler steps, and the sampler made of them.

A sampler is a list of steps. Each changes one row of logits (fp32, -inf masks a token) and the last one draws. Where the tail of the
list is what `ops.sample` does (penalties, temperature, top-k, top-p, min-p, draw), the engine runs it as one native call for all rows of
a batch (`CustomSampler.plan`); both ways draw the same token. The draw is that of `ops.sample`: the first id whose cumulative probability
exceeds u(seed, counter). So a job's tokens depend on its own seed and position only, never on the batch or on a global generator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl3.errors import ArgumentError, NumericalError
from exl3.generate.arguments import count, number

NO_RANGE = 100_000_000
_LARGEST = 3e38  # of fp32


def uniform(seed: int, counter: int) -> float:
    """The number in (0, 1) that decides draw `counter` of a job (first Philox word, as in `ops.sample`)."""
    from exl3.ops.reference import philox

    return float((philox(seed, counter)[0] + 0.5) / 2**32)


@dataclass
class State:
    """One row on its way through the steps."""

    logits: Tensor  # (vocab,) fp32, changed in place or replaced
    past_ids: np.ndarray  # int32, prompt and generated tokens
    u: float = 0.5  # the number in (0, 1) that decides the draw
    memory: dict[Any, Any] = field(default_factory=dict)  # belongs to the job: what a stateful step keeps from token to token
    token: int = -1  # set by the last step
    tokenizer: Any = None  # for steps whose default lists come from it

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the state of a sampler has no {name!r}: a step changes `logits` (vocab,) fp32; steps written for another program's state "
            "are not supported"
        )

    def probs(self) -> Tensor:
        """Softmax of the logits as they stand, (vocab,) fp32."""
        return torch.softmax(self.logits, 0)

    def mask(self, drop: Tensor) -> None:
        """Masks the tokens where `drop` is true."""
        self.logits = self.logits.masked_fill(drop, -math.inf)


class SS_Base:
    """A sampler step."""

    reqs_past_ids = False
    draws = False  # the step chooses the token

    def run(self, state: State) -> None:
        """Changes `state`."""
        raise NotImplementedError

    def alt(self) -> SS_Base | None:
        """A cheaper step that does the same with these arguments; None: this one."""
        return None


class SS_NoOp(SS_Base):
    """Does nothing."""

    def run(self, state: State) -> None:
        pass


class SS_Normalize(SS_NoOp):
    """Kept for programs that name it: steps here normalise where they need it."""


class SS_Sort(SS_NoOp):
    """Kept for programs that name it: steps here sort where they need it."""


class SS_Temperature(SS_Base):
    """logits / temperature; 0 leaves only the most likely token."""

    def __init__(self, temperature: float) -> None:
        self.temperature = number("temperature", temperature, 0, 1e6)

    def run(self, state: State) -> None:
        if self.temperature == 0:
            best = int(state.logits.argmax())
            drop = torch.ones_like(state.logits, dtype=torch.bool)
            drop[best] = False
            state.mask(drop)
        else:
            state.logits = state.logits / self.temperature

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.temperature == 1 else None


class SS_MinP(SS_Base):
    """Keeps tokens at least `min_p` times as likely as the likeliest."""

    def __init__(self, min_p: float) -> None:
        self.min_p = number("min_p", min_p, 0, 1)

    def run(self, state: State) -> None:
        p = state.probs()
        state.mask(p < self.min_p * p.max())

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.min_p <= 0 else None


class SS_TopK(SS_Base):
    """Keeps the `top_k` likeliest tokens and those that tie with the last of them."""

    def __init__(self, top_k: int) -> None:
        self.top_k = max(0, min(count("top_k", top_k), NO_RANGE))

    def run(self, state: State) -> None:
        if self.top_k < len(state.logits):
            state.mask(state.logits < torch.topk(state.logits, self.top_k).values[-1])

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.top_k <= 0 else None


class SS_TopP(SS_Base):
    """Keeps the smallest set of likeliest tokens whose probability reaches `top_p` (Hugging Face's rule: the one that crosses stays)."""

    def __init__(self, top_p: float) -> None:
        self.top_p = number("top_p", top_p, 0, 1)

    def run(self, state: State) -> None:
        order = torch.sort(state.logits, descending=True, stable=True).indices
        p = torch.softmax(state.logits.double(), 0)[order]
        drop = p.cumsum(0) - p >= self.top_p
        drop[0] = False
        mask = torch.zeros_like(state.logits, dtype=torch.bool)
        mask[order] = drop
        state.mask(mask)

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.top_p >= 1 else None


def _recency(n: int, sustain: int, decay: int) -> np.ndarray:
    """Weight of each of n past tokens: 1 for the last `sustain`, falling to 0 over the `decay` before them."""
    age = np.arange(n)[::-1]
    if decay <= 0:
        return (age < sustain).astype(np.float32)
    return np.clip(1.0 - (age - sustain + 1) / (decay + 1), 0.0, 1.0).astype(np.float32)


class SS_RepP(SS_Base):
    """Repetition penalty: a positive logit of a seen token is divided by `rep_p`, a negative one multiplied.

    Full strength over the last `sustain_range` tokens, fading to none over the `decay_range` before.
    """

    reqs_past_ids = True

    def __init__(self, rep_p: float = 1.0, sustain_range: int = NO_RANGE, decay_range: int = 0) -> None:
        self.rep_p = number("rep_p", rep_p, 1e-6, 1e6)
        self.sustain_range, self.decay_range = count("sustain_range", sustain_range), count("decay_range", decay_range)

    def run(self, state: State) -> None:
        past, weight = _window(state, self.sustain_range, self.decay_range)
        if not len(past):
            return
        used, inverse = np.unique(past, return_inverse=True)
        strength = np.zeros(len(used), np.float32)
        np.maximum.at(strength, inverse, weight)
        at = torch.from_numpy(used.astype(np.int64)).to(state.logits.device)
        penalty = 1 + (self.rep_p - 1) * torch.from_numpy(strength).to(state.logits.device)
        x = state.logits[at]
        state.logits = state.logits.index_copy(0, at, torch.where(x > 0, x / penalty, x * penalty))

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.rep_p == 1 or self.sustain_range + self.decay_range <= 0 else None


class SS_PresFreqP(SS_Base):
    """Subtracts `pres_p` from every seen token and `freq_p` for each time it was seen, over the same kind of range as `SS_RepP`."""

    reqs_past_ids = True

    def __init__(self, pres_p: float = 0.0, freq_p: float = 0.0, sustain_range: int = NO_RANGE, decay_range: int = 0) -> None:
        self.pres_p, self.freq_p = number("pres_p", pres_p, -1e6, 1e6), number("freq_p", freq_p, -1e6, 1e6)
        self.sustain_range, self.decay_range = count("sustain_range", sustain_range), count("decay_range", decay_range)

    def run(self, state: State) -> None:
        past, weight = _window(state, self.sustain_range, self.decay_range)
        if not len(past):
            return
        used, inverse = np.unique(past, return_inverse=True)
        most = np.zeros(len(used), np.float32)
        np.maximum.at(most, inverse, weight)
        total = np.bincount(inverse, weights=weight).astype(np.float32)
        at = torch.from_numpy(used.astype(np.int64)).to(state.logits.device)
        amount = torch.from_numpy(self.pres_p * most + self.freq_p * total).to(state.logits.device)
        state.logits = state.logits.index_copy(0, at, state.logits[at] - amount)

    def alt(self) -> SS_Base | None:
        none = self.pres_p == 0 and self.freq_p == 0
        return SS_NoOp() if none or self.sustain_range + self.decay_range <= 0 else None


def _window(state: State, sustain: int, decay: int) -> tuple[np.ndarray, np.ndarray]:
    """(past ids inside the vocabulary, their weights)."""
    past = state.past_ids[-min(sustain + decay, len(state.past_ids)) :] if len(state.past_ids) else state.past_ids
    weight = _recency(len(past), sustain, decay)
    inside = (past >= 0) & (past < len(state.logits))
    return past[inside], weight[inside]


class SS_DRY(SS_Base):
    """ "Don't repeat yourself": a token that would continue a repeat of length L >= `dry_allowed_length` loses
    multiplier * base ** (L - allowed_length). A repeat doesn't reach over a sequence breaker. Looks back `dry_range` tokens (0: all) but
    at most 2048. (p-e-w's sampler, in llama.cpp's reading.)
    """

    reqs_past_ids = True
    SCAN = 2048

    def __init__(
        self,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_range: int = 0,
        dry_sequence_breakers: Iterable[int] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.multiplier, self.base = number("dry_multiplier", dry_multiplier, 0), number("dry_base", dry_base)
        self.allowed, self.range = count("dry_allowed_length", dry_allowed_length), count("dry_range", dry_range)
        if dry_sequence_breakers is None and tokenizer is not None:
            dry_sequence_breakers = dry_default_sequence_breaker_tokens(tokenizer)
        # None: the defaults of the job's tokenizer, found at the first token
        self.breakers = None if dry_sequence_breakers is None else np.array(sorted(dry_sequence_breakers), np.int64)

    def repeats(self, past: np.ndarray) -> dict[int, int]:
        """token -> length of the longest repeat it would continue."""
        past = past[-min(self.range or self.SCAN, self.SCAN) :]
        n = len(past)
        breaks = np.isin(past, [] if self.breakers is None else self.breakers)
        found: dict[int, int] = {}
        if n < 2 or breaks[-1]:
            return found
        limit = n - int(np.flatnonzero(breaks)[-1]) - 1 if breaks.any() else n  # tokens since the last breaker
        for end in np.flatnonzero(past[:-1] == past[-1]):
            length = 1
            while length < limit and end - length >= 0 and past[end - length] == past[n - 1 - length]:
                length += 1
            token = int(past[end + 1])
            found[token] = max(found.get(token, 0), length)
        return found

    def run(self, state: State) -> None:
        if self.breakers is None and state.tokenizer is not None:
            self.breakers = np.array(sorted(dry_default_sequence_breaker_tokens(state.tokenizer)), np.int64)
        penalized = {t: n for t, n in self.repeats(state.past_ids).items() if n >= self.allowed and 0 <= t < len(state.logits)}
        if not penalized:
            return
        most = math.log(_LARGEST) / math.log(self.base) if self.base > 1 else math.inf  # keep base ** n inside fp32
        at = torch.tensor(list(penalized), device=state.logits.device)
        amount = [min(self.multiplier * self.base ** min(n - self.allowed, most), _LARGEST) for n in penalized.values()]
        state.logits = state.logits.index_copy(0, at, state.logits[at] - torch.tensor(amount, device=state.logits.device))

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.multiplier == 0 or self.base <= 0 else None


class SS_XTC(SS_Base):
    """Exclude top choices: with `probability`, all tokens above `threshold` but the least likely of them go. Applied as the expected
    distribution (a mixture of both outcomes) in place of a coin flip. Protected tokens never go."""

    def __init__(
        self, probability: float, threshold: float, protected_token_ids: Iterable[int] | None = None, tokenizer: Any = None
    ) -> None:
        self.probability, self.threshold = number("xtc_probability", probability, 0, 1), number("xtc_threshold", threshold, 0, 1)
        if protected_token_ids is None and tokenizer is not None:
            protected_token_ids = xtc_default_protected_token_ids(tokenizer)
        self.protected = None if protected_token_ids is None else sorted(set(protected_token_ids))

    def run(self, state: State) -> None:
        if self.protected is None and state.tokenizer is not None:
            self.protected = sorted(xtc_default_protected_token_ids(state.tokenizer))
        p = torch.softmax(state.logits.double(), 0)
        above = p >= self.threshold
        count = int(above.sum())
        if count < 2:
            return
        candidates = torch.where(above, p, torch.inf)
        drop = above.clone()
        drop[int(candidates.argmin())] = False
        if self.protected:
            drop[[t for t in self.protected if t < len(p)]] = False
        without = p.masked_fill(drop, 0.0)
        mixed = (1 - self.probability) * p + self.probability * without / without.sum()
        state.logits = mixed.log().float()

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.probability <= 0 or self.threshold > 0.5 else None


class SS_BanTokens(SS_Base):
    """Masks the given ids."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = sorted({count("banned token id", i) for i in ids})

    def run(self, state: State) -> None:
        inside = [i for i in self.ids if 0 <= i < len(state.logits)]
        state.logits = state.logits.clone()
        state.logits[inside] = -math.inf

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if not self.ids else None


class SS_LogitBias(SS_Base):
    """Adds a bias to the given ids; -inf, or what fp32 can't hold, bans; NaN, +inf and 0 are dropped."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        if not isinstance(bias, Mapping):
            raise ArgumentError(f"SS_LogitBias: a mapping of token ids to numbers is needed, got {bias!r}")
        try:
            keep = {int(i): float(b) for i, b in bias.items()}
        except (TypeError, ValueError) as e:
            raise ArgumentError(f"SS_LogitBias: a mapping of token ids to numbers is needed ({e})") from None
        self.bias = {i: b if b > -_LARGEST else -math.inf for i, b in keep.items() if b != 0 and b < _LARGEST}

    def run(self, state: State) -> None:
        inside = {i: b for i, b in self.bias.items() if 0 <= i < len(state.logits)}
        at = torch.tensor(list(inside), dtype=torch.long, device=state.logits.device)
        add = torch.tensor(list(inside.values()), dtype=torch.float32, device=state.logits.device)
        state.logits = state.logits.index_copy(0, at, state.logits[at] + add)

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if not self.bias else None


class SS_Argmax(SS_Base):
    """The most likely token, the lowest id among equals."""

    draws = True

    def run(self, state: State) -> None:
        state.token = int(torch.nonzero(state.logits == state.logits.max())[0])


class SS_Sample(SS_Base):
    """One draw: the first id whose cumulative probability exceeds u."""

    draws = True

    def run(self, state: State) -> None:
        cumulative = torch.softmax(state.logits.double(), 0).cumsum(0)
        state.token = min(int((cumulative <= state.u * cumulative[-1]).sum()), len(cumulative) - 1)


class SS_Sample_mn(SS_Sample):
    """The same draw; the name of the incumbent's multinomial variant."""


class SS_AdaptiveP(SS_Base):
    """Adaptive-p (MaximilianPW's sampler as in llama.cpp): prefers tokens whose probability lies near a target, and moves the target
    against the running mean of what was chosen, so that this mean approaches `target`. Draws the token itself.

    With d = (p - t) / 0.3 the new logit is 5 - 10 d^2 / (1 + |d|); t = 2 target - mean of chosen probabilities, with weights decay^age.
    """

    draws = True
    WIDTH, PEAK, SHARPNESS = 0.3, 5.0, 10.0

    def __init__(self, target: float = 1.0, decay: float = 0.0) -> None:
        self.target, self.decay = number("adaptive_target", target), min(max(number("adaptive_decay", decay), 0.0), 0.99)

    def run(self, state: State) -> None:
        total, weight = state.memory.get(self, (self.target / (1 - self.decay), 1 / (1 - self.decay)))
        t = min(max(2 * self.target - total / weight, 0.0), 1.0)
        p = torch.softmax(state.logits.double(), 0)
        d = ((p - t) / self.WIDTH).abs()
        x = torch.where(p > 0, self.PEAK - self.SHARPNESS * d * d / (1 + d), -math.inf)
        cumulative = torch.softmax(x, 0).cumsum(0)
        state.token = min(int((cumulative <= state.u * cumulative[-1]).sum()), len(p) - 1)
        state.memory[self] = (float(p[state.token]) + self.decay * total, 1 + self.decay * weight)

    def alt(self) -> SS_Base | None:
        return SS_Sample() if self.target >= 1 or self.target < 0 else None


def dry_sequence_breaker_tokens(tokenizer: Any, strings: Sequence[str] = ("\n", ":", '"', "*")) -> frozenset[int]:
    """Ids of all ordinary tokens whose text contains one of `strings`."""
    from exl3.generate.text import Pieces

    table = Pieces.of(tokenizer)
    wanted = [s.encode() for s in strings]
    return frozenset(i for i, p in enumerate(table.pieces) if i not in table.special and any(w in p for w in wanted))


def dry_default_sequence_breaker_tokens(tokenizer: Any) -> frozenset[int]:
    """Breakers of llama.cpp's default list, and every special token."""
    from exl3.generate.text import Pieces

    return dry_sequence_breaker_tokens(tokenizer) | Pieces.of(tokenizer).special


def xtc_default_protected_token_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens XTC must not exclude: line breaks and special tokens."""
    from exl3.generate.text import Pieces

    return dry_sequence_breaker_tokens(tokenizer, ("\n",)) | Pieces.of(tokenizer).special


@dataclass
class Plan:
    """A sampler cut in two: `before` runs step by step on the row, then one `ops.sample` with `params` does the rest.

    `params` is None where the tail is not what `ops.sample` does. `history`: tokens the penalties in `params` look back; 0 none.
    """

    before: list[SS_Base]
    params: dict[str, float] | None
    history: int = 0


class Sampler:
    """Base of samplers."""

    reqs_past_ids = True
    reqs_torch_seed = False

    def forward(
        self,
        logits: Tensor,
        sequence_ids: Any = None,
        rand_u32: int | None = None,
        tokenizer: Any = None,
        logit_mask: Tensor | None = None,
        return_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Token(s) of logits (..., vocab)."""
        raise NotImplementedError

    def plan(self) -> Plan:
        """How the engine may run this sampler."""
        raise NotImplementedError

    def draw(self, state: State) -> int:
        """Runs all steps on one row."""
        raise NotImplementedError


class CustomSampler(Sampler):
    """A sampler made of steps; the last must draw (`SS_Sample`, `SS_Argmax`, `SS_AdaptiveP`)."""

    def __init__(self, steps: Sequence[SS_Base]) -> None:
        self.steps: list[SS_Base] = []
        for step in steps:
            step = step.alt() or step
            if not isinstance(step, SS_NoOp):
                self.steps.append(step)
        if not self.steps or not self.steps[-1].draws:
            raise ValueError("the last step of a sampler must draw a token: SS_Sample, SS_Argmax or SS_AdaptiveP")
        self.reqs_past_ids = any(s.reqs_past_ids for s in self.steps)
        self._plan = _make_plan(self.steps)

    def plan(self) -> Plan:
        return self._plan

    def draw(self, state: State) -> int:
        for step in self.steps:
            step.run(state)
        return state.token

    def forward(
        self,
        logits: Tensor,
        sequence_ids: Any = None,
        rand_u32: int | None = None,
        tokenizer: Any = None,
        logit_mask: Tensor | None = None,
        return_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        """logits (rows, 1, vocab) or (rows, vocab), any float type -> ids (rows, 1) int64. `rand_u32` decides the draw of every row
        (default: a fresh one from the operating system). `logit_mask`: additive row or packed int32 bits. `return_state`: the States
        instead."""
        import os

        rows = logits.reshape(-1, logits.shape[-1]).float()
        if rand_u32 is None:
            rand_u32 = int.from_bytes(os.urandom(4), "little")
        vocab = getattr(tokenizer, "actual_vocab_size", None) or rows.shape[-1]
        past = np.zeros((1, 0), np.int32) if sequence_ids is None else np.atleast_2d(np.asarray(sequence_ids))
        states = []
        for i, row in enumerate(rows):
            row = row.clone()
            row[vocab:] = -math.inf
            apply_mask(row, logit_mask)
            state = State(row, past[min(i, len(past) - 1)], ((rand_u32 & 0xFFFFFFFF) + 0.5) / 2**32, tokenizer=tokenizer)
            check_finite(row)
            self.draw(state)
            states.append(state)
        if return_state:
            return states
        return torch.tensor([[s.token] for s in states], device=logits.device)


class NoTokenLeftError(NumericalError):
    """Bias, bans and filters together mask every token."""


def check_finite(row: Tensor, what: str = "logits") -> None:
    """NumericalError if the row holds a NaN or +inf, or nothing but -inf."""
    top = float(row.max())
    if not math.isfinite(top):
        if top < 0:
            raise NoTokenLeftError(f"{what}: no token left: bias, bans and filters mask all")
        raise NumericalError(f"{what}: {'NaN' if math.isnan(top) else '+inf'}; the model's output can't be sampled")


def apply_mask(row: Tensor, mask: Tensor | np.ndarray | None) -> None:
    """Applies a filter's mask to a row (vocab,) in place: additive floats, booleans (allowed), or int32 words of 32 allowed-bits."""
    if mask is None:
        return
    given: Tensor = torch.from_numpy(mask) if isinstance(mask, np.ndarray) else mask
    given = given.reshape(-1)
    if given.dtype == torch.bool:
        row[: len(given)].masked_fill_(~given[: len(row)].to(row.device), -math.inf)
        row[len(given) :] = -math.inf
    elif given.dtype == torch.int32:
        bits: np.ndarray = np.unpackbits(given.cpu().numpy().view(np.uint8), bitorder="little").astype(bool)
        apply_mask(row, torch.from_numpy(bits))
    else:
        n = min(len(given), len(row))
        row[:n] += given[:n].to(device=row.device, dtype=row.dtype)


def _make_plan(steps: list[SS_Base]) -> Plan:
    """The longest tail of `steps` that `ops.sample` does, in order RepP, PresFreqP, Temperature, TopK, TopP, MinP, Temperature last."""
    params: dict[str, float] = {}
    if isinstance(steps[-1], SS_Argmax):
        params["temperature"] = 0.0
    elif type(steps[-1]) not in (SS_Sample, SS_Sample_mn):
        return Plan(steps, None)
    at = len(steps) - 1
    greedy = "temperature" in params
    stage = 6  # place in ops.sample's order of the step after this one
    history = 0
    while at > 0:
        step = steps[at - 1]
        place = _place(step, stage, params, greedy)
        if place is None:
            break
        if isinstance(step, (SS_RepP, SS_PresFreqP)):
            if step.decay_range > 0 or (history and history != step.sustain_range):
                break
            history = step.sustain_range
        _merge(step, params, place)
        stage = place
        at -= 1
    return Plan(steps[:at], {"temperature": 1.0, **params}, history)


def _place(step: SS_Base, stage: int, params: dict[str, float], greedy: bool) -> int | None:
    """Where `step` stands in ops.sample's order if it may come before `stage`; None if it can't be merged."""
    order: dict[type, int] = {SS_RepP: 0, SS_PresFreqP: 1, SS_Temperature: 2, SS_TopK: 3, SS_TopP: 4, SS_MinP: 5}
    kind = type(step)
    if kind not in order:
        return None
    if greedy and kind in (SS_Temperature, SS_TopK, SS_TopP, SS_MinP):
        return stage  # none of these moves the largest logit
    if kind is SS_Temperature:
        if step.temperature <= 0:  # type: ignore[attr-defined]
            return None
        if stage == 6:
            return 6 if "temperature" not in params else None
        return 2 if stage > 2 and "temperature" not in params else None
    if kind is SS_MinP and "min_p" not in params and stage == 3 and "top_p" not in params:
        return 3  # min-p is relative to the largest: it may stand before or after top-k
    if kind is SS_TopK and "top_k" in params:
        return None
    place = order[kind]
    return place if place < stage else None


def _merge(step: SS_Base, params: dict[str, float], place: int) -> None:
    """Writes the step's values into the parameters of `ops.sample`."""
    if isinstance(step, SS_RepP):
        params["repetition_penalty"] = step.rep_p
    elif isinstance(step, SS_PresFreqP):
        params["presence_penalty"], params["frequency_penalty"] = step.pres_p, step.freq_p
    elif params.get("temperature") == 0:
        return
    elif isinstance(step, SS_Temperature):
        params["temperature"] = step.temperature
        params["temperature_last"] = float(place == 6)
    elif isinstance(step, SS_TopK):
        params["top_k"] = step.top_k
    elif isinstance(step, SS_TopP):
        params["top_p"] = step.top_p
    elif isinstance(step, SS_MinP):
        params["min_p"] = step.min_p
