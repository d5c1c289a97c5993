"""Many sessions at once: rows of one batch that read, write, come and go on their own.

A row computes what its session would compute alone, whatever rows are beside it: prompts of
different lengths are read without pads (the real tokens of all rows are packed), and each row has
its own sampling, seed, stop strings and penalties.

Sizes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from gla import state
from gla.errors import ConfigError, NumericsError
from gla.generate.reading import Reader
from gla.generate.session import READ_CHARACTERS, Session, SessionState
from gla.generate.writer import Request, Token, Writer, choose


@dataclass(eq=False)
class Row:
    """One session in a batch.

    Attributes:
        session: stands where it joined until the row leaves, then after what was written.
        writer: what it is asked for; ``writer.finish`` tells whether and how it ended.
        error: why it ended otherwise.
    """

    session: Session
    writer: Writer
    error: NumericsError | None = None


class Written(NamedTuple):
    """A token that a row has written, or why it could not.

    Attributes:
        row: the row, which has left the batch if it is finished.
        token: None after an error.
    """

    row: Row
    token: Token | None


class Batch:
    """Rows that step together. It is empty at first.

    Attributes:
        rows: N rows, in the order of the state.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._state: SessionState | None = None  # of N rows

    def join(self, session: Session, request: Request) -> Row:
        """Let a session write as a row from the next step on; use it again when the row has left.

        Raises:
            ConfigError: the request asks for more tokens than there are, or the session is one of
                another model.
            DataError: the session's text ends inside a character.
        """
        if self.rows and session._decoder is not self.rows[0].session._decoder:
            raise ConfigError(
                "session: got one of another model, expected a fork of those in the batch; fix by "
                "using another batch"
            )
        row = Row(session, Writer(request, session.tokenizer, session._unfinished))
        session._end_word()
        if row.writer.finish is None:
            parts = [session._state] if self._state is None else [self._state, session._state]
            # Copied even if it is the only one: a compiled step writes over the state.
            self._state = state.concatenate(parts)
            self.rows.append(row)
        return row

    def step(self) -> list[Written]:
        """Write one token in each row. Rows that are finished leave."""
        if self._state is None:
            return []
        rows, logits = self.rows, self._state.logits
        chosen = choose([row.writer for row in rows], logits)
        written, alive, tokens = [], [], []
        for i, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            if isinstance(token, NumericsError):
                row.error = token
                written.append(Written(row, None))
                continue
            written.append(Written(row, row.writer.take(token, logits[i])))
            if not row.writer.ended:
                alive.append(row)
                tokens.append(token)
        self.leave([row for row in rows if row not in alive])
        if self._state is not None:
            decoder = alive[0].session._decoder
            logits, after = decoder.step(torch.tensor(tokens), self._state.model)
            self._state = SessionState(after, logits)
        self.leave([row for row in alive if row.writer.finish is not None])
        return written

    def leave(self, rows: Sequence[Row]) -> None:
        """Take rows out; their sessions stand after what they have written."""
        if not rows or self._state is None:
            return
        for row in rows:
            row.session._state = state.select(self._state, [self.rows.index(row)])
            row.session._unfinished = row.writer.unfinished
        kept = [i for i, row in enumerate(self.rows) if row not in rows]
        self._state = state.select(self._state, kept) if kept else None
        self.rows = [self.rows[i] for i in kept]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with the rows of these numbers, in this order; a repeated one becomes two.

        For beams. The first copy of a row keeps its ``Row``; each further one gets its own session
        and draws the same random numbers from here on. Rows left out leave.
        """
        if self._state is None:
            return
        chosen: list[Row] = []
        for number in rows:
            row = self.rows[number]
            if row in chosen:
                row = Row(row.session.fork(), row.writer.copy())
            chosen.append(row)
        dropped = [row for row in self.rows if row not in chosen]
        whole = self._state
        self.leave(dropped)
        self._state = state.select(whole, rows) if chosen else None
        self.rows = chosen


def read_together(session: Session, prompts: Sequence[str]) -> list[Session]:
    """Return a fork of the session for each prompt, all read at once, each as it would be alone.

    Raises:
        DataError: a lone surrogate, or the session's text ends inside a character.
    """
    sessions = [session.fork() for _ in prompts]
    ids = [_settled(fork, prompt) for fork, prompt in zip(sessions, prompts, strict=True)]
    rows = [i for i, row in enumerate(ids) if row]
    if not rows:
        return sessions
    tokens = torch.zeros(len(rows), max(len(ids[i]) for i in rows), dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for place, i in enumerate(rows):
        tokens[place, : len(ids[i])] = torch.tensor(ids[i])
        mask[place, : len(ids[i])] = True
    before = state.select(session._state.model, [0] * len(rows))
    logits, after = session._decoder.prefill(tokens, before, mask)
    for place, i in enumerate(rows):
        sessions[i]._state = state.select(SessionState(after, logits), [place])
    return sessions


def _settled(session: Session, prompt: str) -> list[int]:
    """Hand a prompt to a session, and take out the tokens that its model has to read now."""
    text = "".join(Reader(session._undecoded).pieces(prompt, READ_CHARACTERS))
    session._unfinished = b"" if text else session._unfinished
    text = session._waiting + text
    settled = session.tokenizer.settled(text)
    session._waiting = text[settled:]
    return session.tokenizer.encode(text[:settled])


def write_together(
    session: Session, prompts: Sequence[str], request: Request, seeds: Sequence[int] | None = None
) -> list[str]:
    """Continue many prompts at once, each as it would be alone.

    Args:
        session: each prompt continues its text; it stays where it is.
        prompts: any number, of any lengths.
        request: what to write for each.
        seeds: one for each prompt; that of the request if None.

    Returns:
        The continuations.

    Raises:
        NumericsError: a row's logits are NaN.
    """
    given = [request.seed] * len(prompts) if seeds is None else list(seeds)
    batch = Batch()
    rows = [
        batch.join(fork, replace(request, seed=seed))
        for fork, seed in zip(read_together(session, prompts), given, strict=True)
    ]
    texts = {id(row): "" for row in rows}
    while batch.rows:
        for row, token in batch.step():
            if token is None:
                assert row.error is not None
                raise row.error
            texts[id(row)] += token.text
    return [texts[id(row)] for row in rows]
