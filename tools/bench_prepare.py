"""Speed and memory of ``gla data prepare`` on a made-up corpus of any size.

    python tools/bench_prepare.py --megabytes 2000            # bigger than the memory it may take
    python tools/bench_prepare.py --megabytes 100 --workers 2

Writes .jsonl files of documents that are all different, from a seeded generator over the words of
Python's standard library, prepares them in a process of its own, and prints MB/s and the most
memory that this process held.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from gla.data.corpus import Corpus
from gla.data.prepare import prepare
from gla.data.tokenizer import Tokenizer

_DOCUMENT_BYTES = 4000
_FILE_BYTES = 200_000_000


def write_corpus(folder: Path, size: int) -> None:
    """Write about ``size`` bytes of text in documents of a few kB."""
    lines: list[str] = []
    for document in Corpus("stdlib"):
        lines += document.text.splitlines()
        if len(lines) > 100_000:
            break
    rng = random.Random(0)  # noqa: S311 - text to measure with
    written, number, file = 0, 0, None
    while written < size:
        if file is None or file.tell() > _FILE_BYTES:
            file = open(folder / f"{number:05}.jsonl", "w", encoding="utf-8")
        length, part = 0, [f"# document {number}"]
        while length < _DOCUMENT_BYTES:
            at = rng.randrange(len(lines) - 40)
            part += lines[at : at + 40]
            length += sum(map(len, lines[at : at + 40]))
        text = "\n".join(part)
        file.write(json.dumps({"text": text}) + "\n")
        written += len(text.encode())
        number += 1
    if file is not None:
        file.close()


def main() -> int:
    """Make the corpus, prepare it in a forked process, print what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=4096)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "text").mkdir()
        write_corpus(root / "text", options.megabytes * 1_000_000)
        Tokenizer.train(root / "text", options.vocab_size, root / "tok", sample_bytes=4 << 20)
        began = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            # What the parent holds is not this process's; count from here.
            done = prepare(root / "text", root / "tok", root / "out", 0.01, workers=options.workers)
            kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            size = done.train.num_bytes + done.val.num_bytes
            seconds = time.perf_counter() - began
            print(f"{size / 1e6:,.0f} MB of text, {done.train.num_documents:,} documents")
            print(f"{size / 1e6 / seconds:.1f} MB/s with {options.workers} worker(s)")
            print(f"{kib / 1024:.0f} MiB held at most, {kib * 1024 / size:.2f} of the text")
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
