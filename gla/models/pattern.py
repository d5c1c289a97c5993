"""The pattern language of ``layers``: which mixer stands in which block.

    entry  = item ("," item)*
    item   = (name | "(" entry ")") ["*" count]

"softmax*2" is two blocks; "(gla*3, softmax)*2" is gla, gla, gla, softmax, twice. So a list holds

    first n          ["softmax*2", "gla*10"]
    every k-th       ["(gla*3, softmax)*3"]
    any list         ["gla", "softmax", "gla", "window"]
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\s*(?:(?P<name>[\w.-]+)|(?P<mark>[(),*]))")
_MAX_BLOCKS = 10_000


def expand(entry: str) -> list[str]:
    """Return the names of an entry of ``layers``, one a block.

    Raises:
        ValueError: it is no pattern; the message says what was expected, and where.
    """
    parser = _Parser(entry)
    names = parser.sequence()
    parser.expect("", "'*', ',' or the end")
    return names


class _Parser:
    def __init__(self, entry: str) -> None:
        self.tokens = []
        end, text = 0, entry.rstrip()
        while end < len(text):
            match = _TOKEN.match(text, end)
            if match is None:
                raise ValueError(
                    f"got {text[end:].strip()[0]!r}, expected a name, a count or ( ) , *"
                )
            self.tokens.append(match.group().strip())
            end = match.end()
        self.tokens.append("")
        self.at = 0

    def expect(self, token: str, wanted: str) -> None:
        found = self.tokens[self.at]
        if found != token:
            raise ValueError(f"got {found or 'the end'!r}, expected {wanted}")
        self.at += 1

    def sequence(self) -> list[str]:
        names = self.item()
        while self.tokens[self.at] == ",":
            self.at += 1
            names += self.item()
        return names

    def item(self) -> list[str]:
        if self.tokens[self.at] == "(":
            self.at += 1
            names = self.sequence()
            self.expect(")", "')', '*' or ','")
        else:
            name = self.tokens[self.at]
            if not name or name in "),*":
                raise ValueError(f"got {name or 'the end'!r}, expected a name or '('")
            names = [name]
            self.at += 1
        if self.tokens[self.at] != "*":
            return names
        count = self.tokens[self.at + 1]
        if not count.isdecimal() or int(count) < 1:
            raise ValueError(f"got {count or 'the end'!r}, expected a count of at least 1")
        if int(count) * len(names) > _MAX_BLOCKS:
            raise ValueError(
                f"got {count} times {len(names)}, expected at most {_MAX_BLOCKS} blocks"
            )
        self.at += 2
        return names * int(count)
