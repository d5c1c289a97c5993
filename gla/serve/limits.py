"""What a server takes on, and the refusals it answers with."""

from __future__ import annotations

from dataclasses import dataclass, fields

from gla.errors import ConfigError

STOPS = "server: got a request while it stops, expected none; fix by asking again later"


@dataclass(frozen=True)
class Limits:
    """Bounds of a server; each at least 1, and most of them an option of ``gla serve``.

    Attributes:
        max_body: bytes of a request.
        max_tokens: tokens that one request may ask for, in each of its choices.
        choices: texts that one request may ask for (prompts times n).
        concurrency: texts that are read or written at the same time.
        queue: texts that wait for a place; more are refused.
        max_states: named states on the disk.
        states_in_memory: those of them that are kept in memory too.
        grace: seconds that running requests get to end when the server is told to stop.

    Raises:
        ConfigError: one below 1.
    """

    max_body: int = 8 << 20
    max_tokens: int = 4096
    choices: int = 16
    concurrency: int = 16
    queue: int = 64
    max_states: int = 256
    states_in_memory: int = 16
    grace: int = 10

    def __post_init__(self) -> None:
        for field in fields(self):
            if (got := getattr(self, field.name)) < 1:
                option = "--" + field.name.replace("_", "-")
                raise ConfigError(
                    f"{option}: got {got}, expected at least 1; fix by giving more, or leave it "
                    "out for the default"
                )


class Refusal(Exception):
    """A request that is answered with an error: an HTTP status and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
