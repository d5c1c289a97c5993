"""What is asked of one row, and what it has written: end marks, stop strings, whole characters.

A writer knows neither the model nor its state. A session has one, a batch one for each row, and
both write the same text for the same logits.

Sizes: B rows, V vocabulary.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gla.data.tokenizer import Tokenizer
from gla.errors import ConfigError, NumericsError
from gla.generate.sampling import Sampling, sample, seeded_generator


@dataclass(frozen=True)
class Request:
    """What to write.

    Attributes:
        max_new_tokens: at most this many tokens.
        sampling: how each is chosen; penalties count what this request has written.
        stop: the text ends before the first of these strings to be complete, wherever token
            boundaries lie.
        seed: the same seed after the same text gives the same continuation; None differs each time.
        top_logprobs: give each token's log-probability, and those of this many likeliest tokens,
            before penalties, temperature and filters; None gives none.

    Raises:
        ConfigError: a value out of range.
    """

    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ConfigError(
                f"max_new_tokens: got {self.max_new_tokens}, expected ≥ 0; fix max_new_tokens"
            )
        if "" in self.stop:
            raise ConfigError(
                "stop: got the empty string, which is everywhere, expected text; fix by leaving "
                "it out"
            )
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise ConfigError(
                f"top_logprobs: got {self.top_logprobs}, expected ≥ 0; fix top_logprobs"
            )
        seeded_generator(self.seed)


class Token(NamedTuple):
    """One token that was written.

    Attributes:
        id: of the token.
        data: its bytes, which may be part of a character.
        text: what came out with it: whole characters, among them those that waited before.
        logprob: natural log of its probability, if that was asked for.
        top: ids and log-probabilities of the likeliest tokens, likeliest first.
    """

    id: int
    data: bytes
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Writer:
    """One row at work.

    Args:
        request: what to write.
        tokenizer: turns tokens into bytes.
        unfinished: the start of a character that was written before.

    Attributes:
        finish: None while there is more to write; then "length" (max_new_tokens) or "stop" (a stop
            string, or the model's end mark).
        ended: whether it was the end mark, which is not taken into the state.
        unfinished: bytes at the end that are no whole character yet.

    Raises:
        ConfigError: more tokens are asked for, in top_k or top_logprobs, than there are.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, unfinished: bytes = b"") -> None:
        request.sampling.check_vocab_size(tokenizer.vocab_size)
        if (request.top_logprobs or 0) > tokenizer.vocab_size:
            raise ConfigError(
                f"top_logprobs: got {request.top_logprobs}, expected at most the vocabulary's "
                f"{tokenizer.vocab_size} tokens; fix top_logprobs"
            )
        self.request = request
        self.unfinished = unfinished
        self.ended = False
        self.finish: Literal["length", "stop"] | None = None if request.max_new_tokens else "length"
        self.generator = seeded_generator(request.seed)
        self.counts: Tensor | None = None
        if request.sampling.penalizes:
            self.counts = torch.zeros(1, tokenizer.vocab_size, dtype=torch.int64)
        self._tokenizer = tokenizer
        self._written = 0
        self._held = ""  # text that may be the start of a stop string

    def copy(self) -> Writer:
        """A writer that goes on from here on its own, drawing the same numbers."""
        twin = copy.copy(self)
        twin.generator = self.generator.clone_state()
        twin.counts = None if self.counts is None else self.counts.clone()
        return twin

    def take(self, token: int, logits: Tensor) -> Token:
        """Note a token that was chosen.

        Args:
            token: its id.
            logits: [V] from which it was chosen.

        Returns:
            The token; the end mark brings out what was held back.
        """
        logprob, top = self._log_probabilities(token, logits)
        if token == self._tokenizer.eos_id:
            self.ended, self.finish = True, "stop"
            return Token(token, b"", self._rest(), logprob, top)
        self._written += 1
        if self.counts is not None:
            self.counts[0, token] += 1
        data = self._tokenizer.decode_bytes([token])
        text, used = codecs.utf_8_decode(self.unfinished + data, "replace", False)
        self.unfinished = (self.unfinished + data)[used:]
        text = self._until_stop(text)
        if self.finish is None and self._written == self.request.max_new_tokens:
            self.finish = "length"
            text += self._rest()
        return Token(token, data, text, logprob, top)

    def _until_stop(self, text: str) -> str:
        """What can come out of the text so far: none of a stop string, nor what may become one."""
        if not self.request.stop:
            return text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self.request.stop if (at := text.find(stop)) >= 0]
        if found:
            self.finish, self._held, self.unfinished = "stop", "", b""
            # The one complete first, as if the text came character by character.
            return text[: min(found)[1]]
        keep = max(map(lambda stop: _overlap(text, stop), self.request.stop))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _rest(self) -> str:
        rest, self._held = self._held, ""
        return rest

    def _log_probabilities(
        self, token: int, logits: Tensor
    ) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        if self.request.top_logprobs is None:
            return None, ()
        logprobs = torch.log_softmax(logits.detach().to("cpu", torch.float64), -1)
        values, ids = logprobs.topk(self.request.top_logprobs)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return float(logprobs[token]), top


def choose(writers: Sequence[Writer], logits: Tensor) -> list[int | NumericsError]:
    """Choose the next token of each row, each from its own generator.

    Args:
        writers: B of them.
        logits: [B, V].

    Returns:
        B ids; the error in place of one where a row's logits are no distribution.
    """
    logits = logits.detach().cpu()
    chosen: list[int | NumericsError] = [0] * len(writers)
    groups: dict[Sampling, list[int]] = {}
    for i, writer in enumerate(writers):
        groups.setdefault(writer.request.sampling, []).append(i)
    for sampling, rows in groups.items():
        try:
            tokens = _choose_alike([writers[i] for i in rows], sampling, logits[rows])
        except NumericsError:  # found before any number was drawn: each row by itself
            for i in rows:
                try:
                    chosen[i] = _choose_alike([writers[i]], sampling, logits[[i]])[0]
                except NumericsError as error:
                    chosen[i] = error
            continue
        for i, token in zip(rows, tokens, strict=True):
            chosen[i] = token
    return chosen


def _choose_alike(writers: list[Writer], sampling: Sampling, logits: Tensor) -> list[int]:
    counts = [writer.counts for writer in writers if writer.counts is not None]
    generators = [writer.generator for writer in writers]
    return sample(logits, sampling, generators, torch.cat(counts) if counts else None).tolist()


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the start of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
