"""What weights in fewer bits cost in quality: the loss of a run on a text, at each width.

python tools/weights_quality.py RUN TEXT [--max-bytes 200000] [--device cpu] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gla.errors import ConfigError, GlaError
from gla.generate.decoder import WIDTHS
from gla.generate.session import Session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path)
    parser.add_argument("text", type=Path, help="UTF-8 that the run was not trained on")
    parser.add_argument("--max-bytes", type=int, default=200_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.text.is_file():
        raise ConfigError(f"TEXT: got {options.text}, no file, expected UTF-8 text; fix the path")
    if options.max_bytes < 1:
        raise ConfigError(f"--max-bytes: got {options.max_bytes}, expected 1 or more; fix by more")
    with open(options.text, "rb") as file:
        text = file.read(options.max_bytes).decode("utf-8", errors="ignore")
    rows = {}
    for weights in WIDTHS:
        session = Session.open(options.run, options.device, weights=weights)
        score = session.score(text)
        named = dict(session._decoder.model.state_dict())
        size = sum(x.numel() * x.element_size() for x in named.values())
        rows[weights] = {
            "tokens": len(score.tokens),
            "loss": score.loss,
            "perplexity": score.perplexity,
            "weight_bytes": size,
        }
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{rows['fp32']['tokens']:,} tokens of {options.text}")
    exact = rows["fp32"]["loss"]
    for weights, row in rows.items():
        print(
            f"{weights:6} loss {row['loss']:.4f} ({row['loss'] - exact:+.4f})  "
            f"perplexity {row['perplexity']:.3f}  {row['weight_bytes'] / 1e6:.1f} MB"
        )


if __name__ == "__main__":
    try:
        main()
    except GlaError as reason:
        print(reason, file=sys.stderr)
        sys.exit(reason.exit_code)
