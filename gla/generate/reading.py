"""Text from wherever it comes, in pieces of bounded size: strings, bytes, files, streams.

Bytes are UTF-8, and may be cut inside a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TypeAlias, cast

from gla.errors import DataError

# str is text, bytes are UTF-8, a Path is a file; the others give text or UTF-8 in pieces.
Source: TypeAlias = str | bytes | Path | IO[str] | IO[bytes] | Iterable[str] | Iterable[bytes]


class Reader:
    """Turns sources into text, one after another.

    Args:
        pending: bytes of a character that an earlier source left unfinished.

    Attributes:
        pending: as above, after the last piece.
    """

    def __init__(self, pending: bytes = b"") -> None:
        self.pending = pending

    def pieces(self, source: Source, size: int) -> Iterator[str]:
        """Yield the text of a source in pieces of about ``size`` characters.

        Raises:
            DataError: bytes that are not UTF-8 (a file must also end with a whole character), a
                lone surrogate, text in the middle of a character that began as bytes, a file that
                cannot be opened, or another kind of source.
        """
        if isinstance(source, Path):
            try:
                file = open(source, "rb")
            except OSError as reason:
                raise DataError(
                    f"{source}: got {reason.strerror}, expected a file of text; fix the path"
                ) from reason
            with file:
                yield from self._decoded(_blocks(file, size), size, str(source), whole=True)
            return
        if isinstance(source, str | bytes):
            blocks = (source[start : start + size] for start in range(0, len(source), size))
        elif hasattr(source, "read"):
            blocks = _blocks(cast("IO[str] | IO[bytes]", source), size)
        elif isinstance(source, Iterable):
            blocks = source
        else:
            raise DataError(
                f"text: got {type(source).__name__}, expected str, bytes, a Path, a stream or an "
                "iterable of text; fix the source"
            )
        yield from self._decoded(blocks, size, "text", whole=False)

    def _decoded(
        self, blocks: Iterable[str | bytes], size: int, where: str, whole: bool
    ) -> Iterator[str]:
        """Decode blocks, and join small ones so that the model never reads word by word."""
        waiting: list[str] = []
        length = 0
        offset = -len(self.pending)  # of the first byte not decoded yet
        begun = False
        for block in blocks:
            if isinstance(block, str):
                self._check_text(block, where)
                text = block
            elif isinstance(block, bytes | bytearray | memoryview):
                text, offset = self._decode(bytes(block), where, offset)
                if whole and not begun:
                    text = text.removeprefix("\ufeff")
            else:
                raise DataError(
                    f"{where}: got {type(block).__name__}, expected str or bytes; fix the source"
                )
            begun = begun or bool(text)
            waiting.append(text)
            length += len(text)
            if length >= size:
                joined = "".join(waiting)
                yield from (joined[i : i + size] for i in range(0, length, size))
                waiting, length = [], 0
        if whole and self.pending:
            raise DataError(_not_utf8(where, offset, "a character cut short at its end"))
        if length:
            yield "".join(waiting)

    def _decode(self, data: bytes, where: str, offset: int) -> tuple[str, int]:
        data = self.pending + data
        try:
            text, used = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError as reason:
            at = offset + reason.start
            raise DataError(_not_utf8(where, at, "a byte that is not UTF-8")) from None
        self.pending = data[used:]
        return text, offset + used

    def _check_text(self, text: str, where: str) -> None:
        if text:
            self.check_whole(where)
        try:
            text.encode()
        except UnicodeEncodeError as reason:
            raise DataError(
                f"{where}: got the lone surrogate U+{ord(text[reason.start]):04X} at character "
                f"{reason.start}, expected Unicode text; fix by decoding the input as UTF-8"
            ) from None

    def check_whole(self, where: str) -> None:
        """Refuse to go on in the middle of a character (DataError)."""
        if self.pending:
            raise DataError(
                f"{where}: got text after the bytes {self.pending.hex(' ')}, the start of a "
                "character, expected its other bytes; fix by reading those first"
            )


def _blocks(file: IO[str] | IO[bytes], size: int) -> Iterator[str | bytes]:
    # A pipe gives what there is; waiting for a full block would hold back what can be read already.
    read = getattr(file, "read1", file.read)
    while block := read(size):
        yield block


def _not_utf8(where: str, offset: int, got: str) -> str:
    return f"{where}: got {got} at offset {offset}, expected UTF-8 text; fix by converting it"
