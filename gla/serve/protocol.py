"""Requests and answers: what of OpenAI's completions is spoken, and what is added to it.

Added: ``top_k``, ``min_p``, ``repetition_penalty``; ``state``, the name of a saved state that the
prompt continues; ``save_state``, the name under which the state after the text is kept. Keys of
OpenAI's that mean something else than is done here are refused unless they have their neutral
value.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator

from gla.errors import ConfigError
from gla.generate.sampling import Sampling
from gla.generate.writer import Request, Token
from gla.serve.limits import Limits, Refusal
from gla.tables import describe_faults

Name = Annotated[str, Field(min_length=1, max_length=200)]
# One fault is told, not one for each of a million items.
_Texts = Annotated[list[str], Field(fail_fast=True)]
_Stops = Annotated[list[str], Field(fail_fast=True, max_length=16)]
Body = TypeVar("Body", bound=BaseModel)

_MAX_LOGPROBS = 20


def _whole(wanted: str) -> WrapValidator:
    """Let a field of several types be told of as one, not once for each type."""

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise ValueError(
                f"got {reprlib.repr(value)}, expected {wanted}; fix by sending that"
            ) from None

    return WrapValidator(check)


Prompt = Annotated[str | _Texts, _whole("text, or a list of texts (tokens are not taken)")]
Stop = Annotated[str | _Stops | None, _whole("text, or a list of at most 16 texts")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool = False


class CompletionBody(_Strict):
    """Body of POST /v1/completions."""

    model: str | None = None
    prompt: Prompt = ""
    max_tokens: Annotated[int, Field(ge=0)] = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    n: Annotated[int, Field(ge=1)] = 1
    stop: Stop = None
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    state: Name | None = None
    save_state: Name | None = None
    user: str | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None
    presence_penalty: float = 0.0
    logit_bias: dict[str, Any] | None = None


class StateBody(_Strict):
    """Body of POST /v1/states: read ``text`` after the state ``state``, and keep it as ``name``."""

    name: Name
    text: str
    state: Name | None = None


def parse(kind: type[Body], data: bytes) -> Body:
    """Check the body of a request.

    Raises:
        Refusal: no JSON object in UTF-8, or fields that do not fit.
    """
    try:
        table = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
        json.dumps(table, ensure_ascii=False).encode()  # finds lone surrogates, wherever they are
    except (ValueError, RecursionError) as reason:
        raise Refusal(
            400,
            f"body: got no JSON ({str(reason)[:100]}), expected an object; fix the body",
        ) from None
    if not isinstance(table, dict):
        raise Refusal(
            400, f"body: got {type(table).__name__}, expected a JSON object; fix by sending one"
        )
    unknown = next((key for key in table if key not in kind.model_fields), None)
    if unknown is not None:  # one of them is told, as above
        table = {unknown: table[unknown]}
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        line = describe_faults(kind, error).splitlines()[0]
        raise Refusal(400, line if len(line) < 500 else line[:300] + " … " + line[-150:]) from None


def prompts_of(body: CompletionBody, limits: Limits) -> list[str]:
    """The prompts of a completion, each once.

    Raises:
        Refusal: more texts or tokens than a request may ask for, or a key that is not supported.
    """
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    choices = len(prompts) * body.n
    most = min(limits.choices, limits.concurrency + limits.queue)  # more would never find room
    if not 1 <= choices <= most:
        raise Refusal(
            400,
            f"prompt: got {len(prompts)} prompts × n = {body.n}, expected 1 to {most} texts; fix n "
            "or send several requests",
        )
    if body.max_tokens > limits.max_tokens:
        raise Refusal(
            400,
            f"max_tokens: got {body.max_tokens}, expected at most {limits.max_tokens}; fix "
            "max_tokens",
        )
    if body.save_state is not None and choices > 1:
        raise Refusal(400, f"save_state: got {choices} texts, expected one; fix n or the prompt")
    for field, neutral in (
        ("echo", (False,)),
        ("best_of", (None, 1, body.n)),
        ("suffix", (None, "")),
        ("presence_penalty", (0.0,)),
        ("logit_bias", (None, {})),
    ):
        if (got := getattr(body, field)) not in neutral:
            raise Refusal(
                400,
                f"{field}: got {str(got)[:100]!r}, which is not done here; fix by leaving it out",
            )
    return prompts


def requests_of(body: CompletionBody, prompts: int, vocab_size: int) -> list[Request]:
    """What to write for each choice: prompt by prompt, n of each, with seeds that count up.

    Raises:
        Refusal: an option out of its range.
    """
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    try:
        sampling = Sampling(
            body.temperature,
            body.top_k,
            body.top_p,
            body.min_p,
            body.repetition_penalty,
            body.frequency_penalty,
        )
        sampling.check_vocab_size(vocab_size)
        request = Request(body.max_tokens, sampling, stop, body.seed, body.logprobs)
    except ConfigError as reason:
        raise Refusal(400, str(reason)) from None
    seeds = [None if body.seed is None else body.seed + i for i in range(prompts * body.n)]
    return [replace(request, seed=seed) for seed in seeds]


def error_object(refusal: Refusal) -> dict[str, Any]:
    """The JSON of a refusal, in OpenAI's form."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    field = refusal.message.partition(":")[0]
    return {"error": {"message": refusal.message, "type": kind, "param": field, "code": None}}


def choice_object(
    index: int,
    text: str,
    finish: str | None,
    logprobs: dict[str, Any] | None,
) -> dict[str, Any]:
    """One choice of an answer, or one piece of it."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def logprobs_object(
    tokens: Sequence[Token], offset: int, spell: Callable[[int], bytes]
) -> dict[str, Any]:
    """Log-probabilities of tokens in the legacy form of completions.

    Args:
        tokens: with their log-probabilities.
        offset: characters of the answer before them.
        spell: the bytes of a token.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [_spelled(token.data) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_by_spelling(token.top, spell) for token in tokens],
        "text_offset": offsets,
    }


def _by_spelling(
    top: Sequence[tuple[int, float]], spell: Callable[[int], bytes]
) -> dict[str, float]:
    """The likeliest tokens by their text; of two that are spelled alike, the likelier."""
    found: dict[str, float] = {}
    for token, logprob in top:  # likeliest first
        found.setdefault(_spelled(spell(token)), logprob)
    return found


def usage_object(read: int, written: int) -> dict[str, int]:
    """Tokens read, before the text began, and written."""
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }


def _spelled(data: bytes) -> str:
    """The text of a token, or its bytes where they are part of a character, as OpenAI spells it."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the constant {name}")
