"""The errors users meet, each one line: ``<field or file>: got X, expected Y; fix Z``."""


class GlaError(Exception):
    """Base of every error that gla raises for a user's mistake or a broken file.

    ``exit_code`` is what the command line returns.
    """

    exit_code = 1


class ConfigError(GlaError, ValueError):
    """A recipe, option or argument that cannot be used as given."""

    exit_code = 2


class DataError(GlaError):
    """Text, tokenizer or shards that are missing, damaged or do not fit together."""

    exit_code = 3


class CheckpointError(GlaError):
    """A checkpoint that is missing, damaged or belongs to another model."""

    exit_code = 4


class StateError(GlaError):
    """A saved decode state that is damaged or belongs to another model or tokenizer."""

    exit_code = 4


class NumericsError(GlaError):
    """A NaN or infinity where training or generation cannot go on."""

    exit_code = 5


class DistributedError(GlaError):
    """A process group that cannot start or has lost a member."""

    exit_code = 6
