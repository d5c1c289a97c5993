"""Kill two runs with SIGKILL, again and again, and compare them bit for bit with unbroken ones.

    python tools/kill_resume.py                  # 200 kills, some minutes on one core
    python tools/kill_resume.py --kills 20

One run trains in fp16 with an average of its weights through an epoch, the other carries its states
from step to step. Compared are every file of the last checkpoint, metrics.jsonl but for what the
clock says, and TensorBoard. The same code runs in the tests with fewer kills.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gla.data.prepare import prepare  # noqa: E402
from gla.data.tokenizer import Tokenizer  # noqa: E402
from tests.train.conftest import write_texts  # noqa: E402
from tests.train.test_resume import assert_same, assert_same_board, run_driver  # noqa: E402


def main() -> int:
    """Run the kills and print what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="half of them for each run")
    kills = parser.parse_args().kills // 2
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of every kill
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "texts").mkdir()
        write_texts(root / "texts")
        Tokenizer.train(root / "texts", 300, root / "tokenizer")
        prepare(root / "texts", root / "tokenizer", root / "prepared", val_fraction=0.1)
        (root / "runs").mkdir()
        runs = run_driver(root / "runs", root / "prepared", kills, names=("rich", "carried"))
        done = 0
        for recipe in ("rich", "carried"):
            codes = runs.codes[recipe]
            assert set(codes) <= {0, -signal.SIGKILL} and codes[-1] == 0, codes
            done += codes.count(-signal.SIGKILL)
            assert_same(runs.folder / f"{recipe}-killed", runs.folder / recipe)
            assert_same_board(runs.folder / f"{recipe}-killed", runs.folder / recipe)
    print(f"{done} kills, every run bitwise the same as an unbroken one; ", end="")
    print(f"{time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
