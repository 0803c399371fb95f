"""Checks of a job's arguments: what is wrong is named when the job is made, not in the middle of a step."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from exl3.errors import ArgumentError


def whole(name: str, value: Any, low: int, hint: str = "") -> int:
    """A whole number of at least `low`."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(f"{name}: a whole number is needed, got {value!r}") from None
    if number < low:
        raise ArgumentError(f"{name} {number}: {low} {hint}or more is needed")
    return number


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number from `low` to `high`."""
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)):
            raise TypeError
        x = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ArgumentError(f"{name}: a number is needed, got {value!r}") from None
    if not math.isfinite(x) or not low <= x <= high:
        if math.isinf(low) and math.isinf(high):
            raise ArgumentError(f"{name} {value!r}: a finite number is needed")
        which = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise ArgumentError(f"{name} {value!r}: a number {which} is needed")
    return x


def count(name: str, value: Any, low: int = -(1 << 62)) -> int:
    """A whole number of at least `low`, also as a float such as 40.0."""
    return whole(name, int(value) if isinstance(value, float) and value.is_integer() else value, low)


def flag(name: str, value: Any) -> bool:
    """True, False, or None for False."""
    if value is not None and not isinstance(value, (bool, int, np.bool_)):
        raise ArgumentError(f"{name}: True or False is needed, got {value!r}")
    return bool(value)


def listed(name: str, values: Any, what: str) -> list[Any]:
    """`values` as a list; None: an empty one."""
    if values is None:
        return []
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise ArgumentError(f"{name}: a list of {what} is needed, got {values!r}")
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return list(values.reshape(-1).tolist())
    return list(values)


def strings(name: str, values: Any) -> list[str]:
    """A list of str."""
    found = listed(name, values, "strings")
    for value in found:
        if not isinstance(value, str):
            raise ArgumentError(f"{name}: strings are needed, got {value!r}")
    return found


def conditions(name: str, values: Any) -> list[Any]:
    """A list of ids (int), strings and None."""
    found = listed(name, values, "token ids and strings")
    return [v if v is None or isinstance(v, str) else whole(name, v, -(1 << 31)) for v in found]


def filters(values: Any) -> list[Any]:
    """A list of filters."""
    found = listed("filters", values, "filters")
    for value in found:
        if not all(callable(getattr(value, method, None)) for method in ("attach", "feed", "mask")):
            raise ArgumentError(f"filters: instances of Filter are needed, got {value!r}")
    return found


def unshared(filters: list[Any], job: Any) -> None:
    """A filter follows one text: refuses those of a job that still runs, and one that is listed twice."""
    for i, f in enumerate(filters):
        other = getattr(f, "job", None)
        if any(f is g for g in filters[:i]) or (other is not None and other is not job and not other.is_finished):
            whose = "is listed twice" if other is None or other is job else f"belongs to job {other.serial_number}, which still runs"
            raise ArgumentError(f"filters: this {type(f).__name__} {whose}; make one for each job")


def attach(filters: list[Any], job: Any) -> None:
    """Binds the filters to a job; if one refuses, none is."""
    unshared(filters, job)
    try:
        for f in filters:
            f.attach(job)
    except BaseException:
        for f in filters:
            f.job = None
        raise


def pair(name: str, value: Any) -> tuple[int, int]:
    """Two whole numbers."""
    try:
        first, second = value
    except (TypeError, ValueError):
        raise ArgumentError(f"{name}: (window, min_repeats) is needed, got {value!r}") from None
    return whole(name, first, 0), whole(name, second, 0)


def as_ids(input_ids: Any) -> np.ndarray:
    """A prompt as int32 `(n,)`: a tensor or array `(n,)` or `(1, n)`, a list of ids, or a list with exactly one such tensor."""
    if isinstance(input_ids, (list, tuple)) and len(input_ids) == 1 and not isinstance(input_ids[0], int):
        input_ids = input_ids[0]
    try:
        array = input_ids.cpu().numpy() if isinstance(input_ids, torch.Tensor) else np.asarray(input_ids)
    except (ValueError, TypeError) as e:
        raise ArgumentError(f"input_ids: a list of token ids or a tensor (1, n) is needed ({e})") from None
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.dtype == object and all(isinstance(i, int) for i in array.reshape(-1)):  # integers beyond 64 bits
        raise ArgumentError(f"input_ids: {max(array.reshape(-1), key=abs)} is outside any vocabulary")
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"input_ids: whole numbers are needed, got {array.dtype}")
    if array.ndim > 2 or (array.ndim == 2 and array.shape[0] != 1):
        raise ArgumentError(f"input_ids: one sequence of shape (1, n) is needed, got {array.shape}; make one job per sequence")
    array = array.reshape(-1)
    if int(array.min()) < 0 or int(array.max()) >= 1 << 31:
        raise ArgumentError(f"input_ids: {int(array.min())} .. {int(array.max())} do not all fit a vocabulary")
    return array.astype(np.int32)
