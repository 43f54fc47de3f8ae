"""Errors that a user can act on: each message names the cause and the fix."""


class MetadropoutError(Exception):
    """Something the user can mend; the command line prints its message and exits with status 1."""


class ConfigError(MetadropoutError):
    """A recipe or option is wrong: unknown, of the wrong type, or impossible."""


class DataError(MetadropoutError):
    """A data set is missing, damaged, or too small for the episodes asked of it."""


class CheckpointError(MetadropoutError):
    """A checkpoint is missing, damaged, or belongs to another program or run."""


class TrainingError(MetadropoutError):
    """Training cannot go on, for example because the loss is not a number."""
