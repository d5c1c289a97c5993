"""From logits to the next token: greedy, temperature, top-k, top-p, min-p, and penalties.

Pure functions on logits [B, V]; nothing here knows a model, a tokenizer or text. Everything is
computed on the CPU in fp64, so that a seed draws the same tokens whatever device made the logits.

Sizes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gla.errors import ConfigError, NumericsError


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. In this order: penalties, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: divides the logits; 0 is greedy: the largest logit, the lowest id among equals.
        top_k: keep the k likeliest tokens, 1 ≤ k ≤ V; None keeps all.
        top_p: keep the fewest likeliest tokens whose probabilities reach top_p, 0 < top_p ≤ 1
            (Holtzman et al., arXiv 1904.09751).
        min_p: keep the tokens with at least min_p times the probability of the likeliest,
            0 ≤ min_p ≤ 1 (Nguyen et al., arXiv 2407.01082).
        repetition_penalty: divides the logits above 0, and multiplies those below, of tokens
            written before; above 0, 1 is none (Keskar et al., arXiv 1909.05858).
        frequency_penalty: taken off a token's logit for each time it was written; 0 is none.

    Raises:
        ConfigError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"temperature: got {self.temperature}, expected a finite number ≥ 0; fix the "
                "temperature (0 is greedy)"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"top_k: got {self.top_k}, expected ≥ 1; fix top_k or leave it out to keep all"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p: got {self.top_p}, expected 0 < top_p ≤ 1; fix top_p (1 keeps all)"
            )
        if not 0 <= self.min_p <= 1:
            raise ConfigError(
                f"min_p: got {self.min_p}, expected 0 ≤ min_p ≤ 1; fix min_p (0 keeps all)"
            )
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ConfigError(
                f"repetition_penalty: got {self.repetition_penalty}, expected a finite number > 0; "
                "fix repetition_penalty (1 is none)"
            )
        if not math.isfinite(self.frequency_penalty):
            raise ConfigError(
                f"frequency_penalty: got {self.frequency_penalty}, expected a finite number; fix "
                "frequency_penalty (0 is none)"
            )

    @property
    def penalizes(self) -> bool:
        """Whether the choice depends on what was written before."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0

    def check_vocab_size(self, vocab_size: int) -> None:
        """Refuses a top_k that asks for more tokens than there are (ConfigError)."""
        if self.top_k is not None and self.top_k > vocab_size:
            raise ConfigError(
                f"top_k: got {self.top_k}, expected at most the vocabulary's {vocab_size} tokens; "
                "fix top_k or leave it out to keep all"
            )


def seeded_generator(seed: int | None) -> torch.Generator:
    """A CPU generator that `sample` draws from; None seeds it from the operating system.

    Raises:
        ConfigError: a seed outside 0 … 2**63 − 1.
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    elif 0 <= seed < 2**63:
        generator.manual_seed(seed)
    else:
        raise ConfigError(f"seed: got {seed}, expected 0 … 2**63 − 1; fix the seed")
    return generator


def probabilities(logits: Tensor, sampling: Sampling, counts: Tensor | None = None) -> Tensor:
    """The distribution that `sample` draws from.

    Args:
        logits: [B, V], any float dtype, any device; −inf marks a token that must not come.
        sampling: the choice; its top_k must be at most V.
        counts: [B, V] int64 on the CPU, how often each token was written; needed for penalties.

    Returns:
        [B, V] fp64 on the CPU, rows sum to 1; a one-hot row where temperature is 0.

    Raises:
        NumericsError: a row with NaN or +inf, or with no finite logit.
    """
    logits = logits.detach().to("cpu", torch.float64)
    _check_finite(logits)
    sampling.check_vocab_size(logits.shape[-1])
    if sampling.penalizes:
        assert counts is not None
        logits = _penalized(logits, sampling, counts)
    best = logits.argmax(-1, keepdim=True)
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    # Subtracting the largest logit first keeps the division finite at the smallest temperatures.
    logits = (logits - logits.gather(-1, best)) / sampling.temperature
    probs = torch.softmax(logits, -1)
    if sampling.top_k is None and sampling.top_p == 1 and sampling.min_p == 0:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[:, sampling.top_k :] = 0
        ordered /= ordered.sum(-1, keepdim=True)
    # A token stays while those before it fall short of top_p: the first always stays.
    ordered[ordered.cumsum(-1) - ordered >= sampling.top_p] = 0
    ordered[ordered < sampling.min_p * ordered[:, :1]] = 0
    ordered /= ordered.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, ordered)


def sample(
    logits: Tensor,
    sampling: Sampling,
    generators: list[torch.Generator],
    counts: Tensor | None = None,
) -> Tensor:
    """Chooses one token for each row.

    Each row takes one number from its own generator, so that a row's tokens do not depend on the
    rows beside it. Greedy rows take none.

    Args:
        logits: [B, V], see `probabilities`.
        sampling: the choice, the same for all rows.
        generators: B CPU generators.
        counts: see `probabilities`.

    Returns:
        [B] int64 on the CPU.

    Raises:
        NumericsError: see `probabilities`.
    """
    probs = probabilities(logits, sampling, counts)
    if sampling.temperature == 0:
        return probs.argmax(-1)
    uniform = torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
    cumulative = probs.cumsum(-1)
    # Scaling by the row's own sum keeps a draw near 1 on a token whose probability is not zero.
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(-1)


def _penalized(logits: Tensor, sampling: Sampling, counts: Tensor) -> Tensor:
    penalty = sampling.repetition_penalty
    repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
    frequent = sampling.frequency_penalty * counts.to(logits.dtype)
    # Bounded: extreme penalties give an extreme choice, not the difference of infinities.
    bound = torch.finfo(logits.dtype).max / 8
    penalized = repeated.clamp(-bound, bound) - frequent.clamp(-bound, bound)
    return torch.where((counts > 0) & logits.isfinite(), penalized, logits)


def _check_finite(logits: Tensor) -> None:
    """Refuses logits that no sampling may silently turn into text."""
    wrong = int((logits.isnan() | logits.isposinf()).sum())
    if wrong:
        raise NumericsError(
            f"logits: got {wrong} of {logits.numel()} values NaN or +inf, expected finite values; "
            "fix the weights (gla eval shows whether the checkpoint is sound)"
        )
    if bool(logits.isneginf().all(-1).any()):
        raise NumericsError(
            "logits: got a row in which every token is masked (−inf), expected at least one finite "
            "value; fix the mask or the weights"
        )
