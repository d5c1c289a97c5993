"""A session: a model, its tokenizer, and one state that reads and writes text without end.

Text that has been read is not kept. The state of recurrent and window layers has a constant size,
so a session of such layers takes the same memory after ten tokens and after ten million; layers of
full softmax attention keep their keys and values.

Sizes: V vocabulary.
"""

from __future__ import annotations

import codecs
import copy
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gla import state, storage
from gla.data.tokenizer import Tokenizer
from gla.errors import ConfigError, DataError, StateError
from gla.generate.sampling import Sampling, sample, seeded_generator
from gla.models.language_model import LanguageModel
from gla.state import ModelState

READ_CHARACTERS = 1 << 16  # text tokenized and read at once: bounds the memory of ``read``


class SessionState(NamedTuple):
    """What a session has read, as its model holds it.

    Attributes:
        model: state of one sequence after its last token.
        logits: [1, V] of the token after that.
    """

    model: ModelState
    logits: Tensor


class Session:
    """Reads and writes one text of any length. It begins with the begin mark, at position 0.

    What comes next may depend on how a text is cut into tokens, and where a token ends on the text
    that follows. So the last word of what was read waits: until more text or ``generate`` tells.
    ``read("ab")`` and ``read("cd")`` are therefore the same as ``read("abcd")``, whatever the cut.

    Args:
        model: used as it is, in the mode (train or eval) that it is in.
        tokenizer: the one whose tokens the model was trained on.

    Raises:
        ConfigError: their vocabularies differ in size.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        if model.config.vocab_size != tokenizer.vocab_size:
            raise ConfigError(
                f"model.vocab_size: got {model.config.vocab_size}, expected the tokenizer's "
                f"{tokenizer.vocab_size}; fix by using the tokenizer of the model's run"
            )
        self._model = model
        self._tokenizer = tokenizer
        self._waiting = ""  # text read but not tokenized yet
        self._unfinished = b""  # the start of a character that generation has not finished yet
        start = torch.tensor([[tokenizer.bos_id]], device=_device(model))
        logits, read = model.prefill(start)
        self._state = SessionState(read, logits)

    @classmethod
    def open(cls, run: str | Path, device: str | torch.device = "cpu") -> Session:
        """Start a session with the newest checkpoint of a run that verifies.

        Args:
            run: a run folder, or a checkpoint folder inside one.
            device: where the model and the state are.

        Raises:
            CheckpointError: no checkpoint verifies.
            DataError: the run's tokenizer is missing or damaged.
            ConfigError: the model and the tokenizer do not fit together.
        """
        folder = Path(run)
        model = LanguageModel.load(folder, device=device)
        if (folder / storage.MANIFEST).exists():
            folder = folder.parent.parent
        return cls(model, Tokenizer.load(folder / "tokenizer"))

    @property
    def position(self) -> int:
        """Tokens so far: the begin mark, those read, those written."""
        waiting = len(self._tokenizer.encode(self._waiting))
        return int(self._state.model.position[0]) + waiting

    def read(self, text: str) -> None:
        """Read text, in pieces: memory does not grow with its length.

        Raises:
            DataError: a lone surrogate, which no text can hold. Nothing was read.
        """
        _check_unicode(text)
        if text:
            self._unfinished = b""
        for start in range(0, len(text), READ_CHARACTERS):
            self._waiting += text[start : start + READ_CHARACTERS]
            self._tokenize(self._tokenizer.settled(self._waiting))

    def generate(
        self,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Iterator[str]:
        """Continue the text, which ends early where the model ends the document.

        The session has moved past a piece when the piece comes out, so one may stop anywhere and
        read or generate on. The model's end mark is not taken into the state. A character that the
        last token left unfinished waits for the next ``generate``.

        Args:
            max_new_tokens: at most this many tokens.
            temperature: below 1 sharpens, above 1 flattens; 0 always takes the likeliest token.
            top_k: sample from this many likeliest tokens.
            top_p: sample from the fewest likeliest tokens that have this probability together.
            seed: the same seed after the same text gives the same continuation.

        Returns:
            An iterator of pieces of text, each whole characters. Bytes that can begin or continue
            no character come out as U+FFFD.

        Raises:
            ConfigError: an argument out of range, at the call.
            NumericsError: the model gives NaN, while iterating.
        """
        if max_new_tokens < 0:
            raise ConfigError(
                f"max_new_tokens: got {max_new_tokens}, expected ≥ 0; fix max_new_tokens"
            )
        sampling = Sampling(temperature, top_k, top_p)
        sampling.check_vocab_size(self._tokenizer.vocab_size)
        return self._write(max_new_tokens, sampling, seeded_generator(seed))

    def fork(self) -> Session:
        """Return a session that stands where this one stands; neither changes the other."""
        twin = copy.copy(self)
        twin._state = state.map_tensors(self._state, torch.clone)
        return twin

    def save(self, path: str | Path) -> None:
        """Write the session as one file, from which ``load`` goes on exactly here."""
        metadata = {
            **self._fingerprints(),
            "waiting": self._waiting,
            "unfinished": self._unfinished.hex(),
        }
        state.save(self._state, path, metadata)

    @classmethod
    def load(cls, path: str | Path, run: str | Path, device: str | torch.device = "cpu") -> Session:
        """Go on from a file written by ``save``.

        Args:
            path: the file.
            run: the run, or checkpoint, with which it was written.
            device: where the model and the state are; not necessarily where they were.

        Raises:
            StateError: the file is missing, cut short or changed, or belongs to another model,
                checkpoint, tokenizer or dtype.
        """
        session = cls.open(run, device)
        like, place = session._state, _device(session._model)
        session._state, metadata = state.load(path, like, place)
        for what, expected in session._fingerprints().items():
            if (got := metadata.get(what)) != expected:
                raise StateError(
                    f"{path}: got the state of {what} {str(got)[:16]}, expected {expected[:16]}; "
                    "fix by loading it with the run and checkpoint that wrote it"
                )
        session._waiting = metadata["waiting"]
        session._unfinished = bytes.fromhex(metadata["unfinished"])
        return session

    def _tokenize(self, characters: int) -> None:
        """Take the first characters of the waiting text into the state."""
        ids = self._tokenizer.encode(self._waiting[:characters])
        if ids:
            tokens = torch.tensor([ids], device=_device(self._model))
            logits, after = self._model.prefill(tokens, self._state.model)
            self._state = SessionState(after, logits)
        self._waiting = self._waiting[characters:]

    def _write(
        self, max_new_tokens: int, sampling: Sampling, generator: torch.Generator
    ) -> Iterator[str]:
        self._tokenize(len(self._waiting))
        for _ in range(max_new_tokens):
            token = sample(self._state.logits, sampling, [generator])
            if int(token) == self._tokenizer.eos_id:
                return
            logits, after = self._model.decode_step(
                token.to(self._state.logits.device), self._state.model
            )
            self._state = SessionState(after, logits)
            data = self._unfinished + self._tokenizer.decode_bytes(token.tolist())
            piece, used = codecs.utf_8_decode(data, "replace", False)
            self._unfinished = data[used:]
            if piece:
                yield piece

    def _fingerprints(self) -> dict[str, str]:
        return {
            "model": _fingerprint(self._model),
            "tokenizer": self._tokenizer.fingerprint,
            "dtype": str(self._model.embed.weight.dtype),
        }


def _device(model: LanguageModel) -> torch.device:
    return model.embed.weight.device


def _fingerprint(model: LanguageModel) -> str:
    """SHA-256 of the model's config and every weight."""
    digest = hashlib.sha256(model.config.model_dump_json().encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"\n{name} {weight.dtype} {list(weight.shape)}\n".encode())
        flat = weight.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as reason:
        raise DataError(
            f"text: got the lone surrogate U+{ord(text[reason.start]):04X} at character "
            f"{reason.start}, expected Unicode text; fix by decoding the input as UTF-8"
        ) from None
