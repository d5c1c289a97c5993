"""A session: a model, its tokenizer, and one state that reads and writes text without end.

Text that has been read is not kept. The state of recurrent and window layers has a constant size,
so a session of such layers takes the same memory after ten tokens and after ten million; layers of
full softmax attention keep their keys and values.

Sizes: V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from gla import state, storage
from gla.data.tokenizer import Tokenizer
from gla.errors import ConfigError, DataError, NumericsError, StateError
from gla.generate.decoder import PREFILL_TOKENS, Decoder, narrow
from gla.generate.reading import Reader, Source
from gla.generate.sampling import Sampling
from gla.generate.writer import Request, Token, Writer, choose
from gla.models.language_model import LanguageModel
from gla.state import ModelState

READ_CHARACTERS = 1 << 16  # text tokenized and read at once: bounds the memory of ``read``
Progress: TypeAlias = Callable[[list[int]], None]
SCORE_TOKENS = 256  # tokens whose logits stand in memory at once


class SessionState(NamedTuple):
    """What a session has read, as its model holds it.

    Attributes:
        model: state of one sequence after its last token.
        logits: [1, V] of the token after that.
    """

    model: ModelState
    logits: Tensor


class Mark(NamedTuple):
    """A place to come back to; see ``Session.mark``."""

    state: SessionState
    waiting: str
    undecoded: bytes
    unfinished: bytes
    decoder: Decoder

    def __repr__(self) -> str:
        return f"Mark(tokens={int(self.state.model.position[0])}, waiting={self.waiting!r})"


class Score(NamedTuple):
    """How well a text was foreseen.

    Attributes:
        tokens: [T] int64 ids.
        losses: [T] fp32, -ln p(token | all before it).
        logits: [T, V] from which each was foreseen, if they were asked for.
    """

    tokens: Tensor
    losses: Tensor
    logits: Tensor | None

    @property
    def loss(self) -> float:
        """Mean loss, nats a token; a DataError where the text is empty."""
        if not len(self.losses):
            raise DataError("text: got an empty one, expected some tokens to score; fix the text")
        return float(self.losses.double().mean())

    @property
    def perplexity(self) -> float:
        """exp of the mean loss; infinity where that is too large for a float."""
        return float(torch.tensor(self.loss, dtype=torch.float64).exp())


class Session:
    """Reads and writes one text of any length. It begins with the begin mark, at position 0.

    What comes next may depend on how a text is cut into tokens, and where a token ends on the text
    that follows. So the last word of what was read waits: until more text or ``generate`` tells.
    ``read("ab")`` and ``read("cd")`` are therefore the same as ``read("abcd")``, whatever the cut.

    Args:
        model: used as it is, in the mode (train or eval) that it is in.
        tokenizer: the one whose tokens the model was trained on.
        compiled: compile the decode step; see ``Decoder``.

    Raises:
        ConfigError: their vocabularies differ in size, or the model's state grows and the step is
            to be compiled.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, *, compiled: bool = False
    ) -> None:
        if model.config.vocab_size != tokenizer.vocab_size:
            raise ConfigError(
                f"model.vocab_size: got {model.config.vocab_size}, expected the tokenizer's "
                f"{tokenizer.vocab_size}; fix by using the tokenizer of the model's run"
            )
        self.tokenizer = tokenizer
        self._decoder = Decoder(model, compiled)
        self._waiting = ""  # text read but not tokenized yet
        self._undecoded = b""  # the start of a character whose other bytes have not been read yet
        self._unfinished = b""  # the start of a character that generation has not finished yet
        logits, read = self._decoder.prefill(torch.tensor([[tokenizer.bos_id]]), None)
        self._state = SessionState(read, logits)

    @classmethod
    def open(
        cls,
        run: str | Path,
        device: str | torch.device = "cpu",
        *,
        weights: str = "fp32",
        impl: str | None = None,
        compiled: bool = False,
    ) -> Session:
        """Start a session with the newest checkpoint of a run that verifies.

        Args:
            run: a run folder, or a checkpoint folder inside one.
            device: where the model and the state are.
            weights: "fp32", "bf16" or "int8"; fewer bits are faster and less exact.
            impl: form of the op in every mixer on it; None: as trained.
            compiled: compile the decode step; see ``Decoder``.

        Raises:
            CheckpointError: no checkpoint verifies.
            DataError: the run's tokenizer is missing or damaged.
            ConfigError: no run there, a tokenizer that does not fit, or an option is refused.
        """
        folder = Path(run)
        model = narrow(LanguageModel.load(folder, device=device, impl=impl), weights)
        if (folder / storage.MANIFEST).exists():
            folder = folder.parent.parent
        return cls(model, Tokenizer.load(folder / "tokenizer"), compiled=compiled)

    @property
    def position(self) -> int:
        """Tokens so far: the begin mark, those read, those written."""
        waiting = len(self.tokenizer.encode(self._waiting))
        return int(self._state.model.position[0]) + waiting

    def read(self, source: Source, progress: Progress | None = None) -> None:
        """Read text of any length in pieces: memory does not grow with it.

        Args:
            source: text; UTF-8 bytes, which may be cut inside a character; a ``Path``, whose file
                is read; a stream, or an iterable of strings or bytes.
            progress: called with the ids of each piece that was read.

        Raises:
            DataError: no such file, not UTF-8, a lone surrogate. The session stands where it stood.
        """
        before = (self._state, self._waiting, self._undecoded, self._unfinished)
        reader = Reader(self._undecoded)
        try:
            for text in reader.pieces(source, READ_CHARACTERS):
                self._unfinished = b""
                self._waiting += text
                self._tokenize(self.tokenizer.settled(self._waiting), progress)
            self._undecoded = reader.pending
        except BaseException:
            # No state is changed by the call that reads it, so the old one is still whole.
            self._state, self._waiting, self._undecoded, self._unfinished = before
            raise

    def score(self, source: Source, *, logits: bool = False) -> Score:
        """Read text, and tell how well each of its tokens was foreseen.

        A word that waits is ended first, and the last word of the text is ended too.

        Args:
            source: as for ``read``.
            logits: return the logits too, V numbers a token; the rest is 12 bytes a token.

        Raises:
            DataError: as for ``read``; what comes before the fault has been read then.
        """
        self._end_word()
        reader, found = Reader(), []
        for text in reader.pieces(source, READ_CHARACTERS):
            self._unfinished = b""
            self._waiting += text
            found += self._score(self.tokenizer.settled(self._waiting), logits)
        reader.check_whole("text")
        found += self._score(len(self._waiting), logits)
        none = Score(torch.empty(0).long(), torch.empty(0), self._state.logits[:0].cpu())
        tokens, losses, given = zip(*(found or [none]), strict=True)
        return Score(torch.cat(tokens), torch.cat(losses), torch.cat(given) if logits else None)

    def generate(
        self,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        stop: str | tuple[str, ...] | list[str] = (),
        seed: int | None = None,
    ) -> Iterator[str]:
        """Continue the text, which ends early where the model ends the document.

        The session has moved past a piece when the piece comes out, so one may stop anywhere and
        read or generate on. The model's end mark is not taken into the state; a stop string is. A
        character that the last token left unfinished waits for the next ``generate``.

        Args:
            max_new_tokens: at most this many tokens.
            temperature: below 1 sharpens, above 1 flattens; 0 always takes the likeliest token.
            top_k: sample from this many likeliest tokens.
            top_p: sample from the fewest likeliest tokens that have this probability together.
            min_p: sample from tokens at least so likely, as a share of the likeliest's probability.
            repetition_penalty: above 1 makes what this call has written less likely.
            frequency_penalty: above 0 does so for each time that it was written.
            stop: the text ends before the first of these strings.
            seed: the same seed after the same text gives the same continuation.

        Returns:
            An iterator of pieces of text, each whole characters. Bytes that can begin or continue
            no character come out as U+FFFD.

        Raises:
            ConfigError: an argument out of range, at the call.
            DataError: bytes were read that end inside a character, at the call.
            NumericsError: the model gives NaN, while iterating.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        tokens = self.generate_tokens(Request(max_new_tokens, sampling, stops, seed))
        return (token.text for token in tokens if token.text)

    def generate_tokens(self, request: Request) -> Iterator[Token]:
        """Continue the text as ``generate`` does, and tell about each token; errors as there."""
        writer = Writer(request, self.tokenizer, self._unfinished)
        Reader(self._undecoded).check_whole("text")
        return self._write(writer)

    def fork(self) -> Session:
        """Return a session that stands where this one stands; neither changes the other."""
        twin = copy.copy(self)
        twin._state = state.map_tensors(self._state, torch.clone)
        return twin

    def mark(self) -> Mark:
        """Remember this place, at the cost of a copy of the state."""
        copied = state.map_tensors(self._state, torch.clone)
        return Mark(copied, self._waiting, self._undecoded, self._unfinished, self._decoder)

    def rewind(self, mark: Mark) -> None:
        """Go back to a place that this session, or one that it was forked from, has marked.

        A recurrent state cannot be read backwards: this is the copy that was kept. The mark stays
        good for further use.

        Raises:
            StateError: no mark, or one of another session.
        """
        if not isinstance(mark, Mark) or mark.decoder is not self._decoder:
            raise StateError(
                f"mark: got {mark!r}, expected one of this session or its forks; fix by rewinding "
                "the session that was marked"
            )
        self._state = state.map_tensors(mark.state, torch.clone)
        _, self._waiting, self._undecoded, self._unfinished, _ = mark

    def save(self, path: str | Path) -> None:
        """Write the session as one file, or raise a StateError; ``load`` goes on exactly here."""
        metadata = {
            **self._fingerprints(),
            "waiting": self._waiting,
            "undecoded": self._undecoded.hex(),
            "unfinished": self._unfinished.hex(),
            "position": self.position,
        }
        state.save(self._state, path, metadata)

    @classmethod
    def load(
        cls,
        path: str | Path,
        run: str | Path,
        device: str | torch.device = "cpu",
        *,
        weights: str = "fp32",
        impl: str | None = None,
        compiled: bool = False,
    ) -> Session:
        """Go on from a file written by ``save``.

        Args:
            path: the file.
            run: the run, or checkpoint, with which it was written.
            device: where the model and the state are; not necessarily where they were.
            weights: as when it was written.
            impl, compiled: as for ``open``; not necessarily as when it was written.

        Raises:
            StateError: the file is missing, cut short or changed, or belongs to another model,
                checkpoint, tokenizer or width of weights.
        """
        session = cls.open(run, device, weights=weights, impl=impl, compiled=compiled)
        session.restore(path)
        return session

    def restore(self, path: str | Path) -> None:
        """Go on from a file that a session of this model has saved; see ``load``.

        Raises:
            StateError: as for ``load``; the session stands where it stood.
        """
        # Of a state that has read nothing: how far a cache has grown in this session is no measure.
        like = SessionState(self._decoder.model.init_state(1), self._state.logits)
        loaded, metadata = state.load(path, like, self._decoder.device)
        metadata.setdefault("weights", self._decoder.weights)  # older files: told by the model's
        for what, expected in self._fingerprints().items():
            if (got := metadata.get(what)) != expected:
                raise StateError(
                    f"{path}: got the state of {what} {str(got)[:16]}, expected {expected[:16]}; "
                    "fix by loading it with the run, checkpoint and weights that wrote it"
                )
        # Copied to where tensors usually stand in memory: the order of sums may depend on it.
        self._state = state.map_tensors(loaded, torch.clone)
        self._waiting = metadata["waiting"]
        self._undecoded = bytes.fromhex(metadata["undecoded"])
        self._unfinished = bytes.fromhex(metadata["unfinished"])

    def _end_word(self) -> None:
        """Take the word that waits into the state, whatever would have followed it.

        Raises:
            DataError: the text ends inside a character.
        """
        Reader(self._undecoded).check_whole("text")
        self._tokenize(len(self._waiting))

    def _tokenize(self, characters: int, progress: Progress | None = None) -> None:
        """Take the first characters of the waiting text into the state."""
        ids = self.tokenizer.encode(self._waiting[:characters])
        for start in range(0, len(ids), PREFILL_TOKENS):
            piece = ids[start : start + PREFILL_TOKENS]
            logits, after = self._decoder.prefill(torch.tensor([piece]), self._state.model)
            self._state = SessionState(after, logits)
            if progress is not None:
                progress(piece)
        self._waiting = self._waiting[characters:]

    @torch.no_grad()
    def _score(self, characters: int, keep: bool) -> list[Score]:
        """Take the first characters of the waiting text into the state, with their losses."""
        ids = self.tokenizer.encode(self._waiting[:characters])
        self._waiting = self._waiting[characters:]
        found = []
        for start in range(0, len(ids), SCORE_TOKENS):
            tokens = torch.tensor(ids[start : start + SCORE_TOKENS])
            given = tokens.to(self._decoder.device).unsqueeze(0)
            out = self._decoder.model(given, self._state.model)
            logits = torch.cat([self._state.logits, out.logits[0, :-1]])
            wide = torch.promote_types(logits.dtype, torch.float32)
            losses = F.cross_entropy(logits.to(wide), given[0], reduction="none")
            # A copy of the last row: a view would keep all rows in memory.
            self._state = SessionState(out.state, out.logits[:, -1].clone())
            found.append(Score(tokens, losses.float().cpu(), logits.cpu() if keep else None))
        return found

    def _write(self, writer: Writer) -> Iterator[Token]:
        self._end_word()
        while writer.finish is None:
            logits = self._state.logits
            chosen = choose([writer], logits)[0]
            if isinstance(chosen, NumericsError):
                raise chosen
            token = writer.take(chosen, logits[0])
            if not writer.ended:
                logits, after = self._decoder.step(torch.tensor([chosen]), self._state.model)
                self._state = SessionState(after, logits)
                self._unfinished = writer.unfinished
            yield token

    def _fingerprints(self) -> dict[str, str]:
        return {
            "weights": self._decoder.weights,  # first: other weights are another model too
            "model": self._decoder.fingerprint(),
            "tokenizer": self.tokenizer.fingerprint,
        }
