"""The exceptions of exl3. Every message says what is wrong, where, and what to do.

All derive from `Exl3Error`, so that a frontend can catch one name; each also derives from the built-in it resembles, so
that code which knows nothing of exl3 catches it too. The command line turns an `Exl3Error` into one line and exit status 1.
"""

from __future__ import annotations


class Exl3Error(Exception):
    """Base of all errors raised on purpose by exl3."""


class FormatError(Exl3Error, ValueError):
    """A file or tensor does not follow its format: lying header, wrong dtype or shape, both codebook markers."""


class MissingTensorError(FormatError):
    """A tensor the model needs is in none of the directory's files."""


class UnsupportedError(Exl3Error, NotImplementedError):
    """A valid request that this version, backend or architecture does not serve. The message lists what is served."""


class ArgumentError(Exl3Error, ValueError):
    """An argument or option has a value that cannot work."""


class NumericalError(Exl3Error, ArithmeticError):
    """NaN or Inf in weights, activations or logits; names layer, tensor and row."""


class ResourceError(Exl3Error, RuntimeError):
    """Not enough memory, disk or cache. States need and have."""


class BackendError(Exl3Error, RuntimeError):
    """A kernel library is missing, stale, failed its self-test, or reported a fault of the device."""


class JobError(Exl3Error, RuntimeError):
    """A conversion or generation job cannot start or go on: locked work folder, changed settings, cancelled."""
