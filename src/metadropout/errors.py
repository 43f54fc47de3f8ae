"""Errors that a user can act on: each message names the cause and the fix."""

import reprlib

_LONGEST = 60
_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxother, _repr.maxstring, _repr.maxlong = 3, _LONGEST, _LONGEST, _LONGEST


class MetadropoutError(Exception):
    """Something the user can fix; the command line prints its message and exits with status 1."""


class ConfigError(MetadropoutError):
    """A recipe or option is wrong: unknown, of the wrong type, or impossible."""


class DataError(MetadropoutError):
    """A data set is missing, damaged, or too small for the episodes asked of it."""


class CheckpointError(MetadropoutError):
    """A checkpoint is missing, damaged, or belongs to another program or run."""


class RunFileError(MetadropoutError):
    """A file beside a run's checkpoints is damaged or not a file; the message says how to do without it."""


class TrainingError(MetadropoutError):
    """Training cannot go on, for example because the loss is not a number."""


def shortened(value: object) -> str:
    """Write a value for a message: a text as it is, anything else as Python does, and neither at any length."""
    text = value if isinstance(value, str) else _repr.repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
