"""What a run tells: log.txt, metrics.jsonl, TensorBoard, and a progress bar or plain lines.

Each step stands once in every one of them, however often a run was killed: on resume metrics.jsonl
is cut to the checkpoint's step, later samples are removed, and TensorBoard is told to forget what
came later. (Only log.txt tells all that happened.)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from gla import storage
from gla.errors import CheckpointError

# Names in TensorBoard of what metrics.jsonl calls by short names.
_TAGS = {
    "loss": "train/loss",
    "bpb": "train/bits_per_byte",
    "lr": "train/lr",
    "grad_norm": "train/gradient_norm",
    "tokens_per_s": "speed/tokens_per_s",
    "data_wait": "speed/data_wait",
    "tflops": "speed/tflops",
    "mfu": "speed/mfu",
    "memory_gib": "speed/memory_gib",
    "val_loss": "validation/loss",
    "val_bpb": "validation/bits_per_byte",
    "val_accuracy": "validation/accuracy",
    "val_macro_f1": "validation/macro_f1",
}
# What a line on the terminal shows; metrics.jsonl has all.
_SHOWN = (
    *("loss", "lr", "grad_norm", "tokens", "tokens_per_s"),
    *("val_loss", "val_bpb", "val_accuracy", "val_macro_f1"),
)


class Monitor:
    """Writes what is measured. Use as a context manager.

    A disk that refuses a line, a sample or a sync is a CheckpointError: a run without them could
    not be resumed to the same. TensorBoard it can do without.

    Args:
        run: The run's folder.
        start: The step that training starts after; anything recorded later is dropped.
        steps: The last step.
    """

    def __init__(self, run: Path, start: int, steps: int) -> None:
        self.run = run
        self._steps = steps
        self._log = open(run / "log.txt", "a", encoding="utf-8", buffering=1)
        self._metrics_path = run / "metrics.jsonl"
        cut_metrics(self._metrics_path, start)
        for sample in run.glob("samples/step-*.txt"):
            if sample.stem > _sample_name(start):
                sample.unlink()
        self._metrics = open(self._metrics_path, "a", encoding="utf-8", buffering=1)
        self._console = Console(stderr=True)
        self._board: Any = None
        self._board_works = True
        self._on_board(lambda: self._open_board(start))
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=start)

    def __enter__(self) -> Monitor:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self._on_board(lambda: self._board.close())
        for file in (self._metrics, self._log):
            with contextlib.suppress(OSError):  # said when the line was written
                file.close()

    def note(self, text: str) -> None:
        """Write a line to the log and to the terminal."""
        with storage.refused_writes(self.run / "log.txt", CheckpointError):
            self._log.write(_dated(text))
        if self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False)
        else:
            say(text)

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        self._bar.update(self._task, completed=step)

    def record(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Write one line of metrics.jsonl, the scalars of TensorBoard and a line of the log.

        A value that is not finite becomes null and is named under "nonfinite": the file stays JSON.
        """
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        line: dict[str, Any] = {"step": step}
        line |= {name: None if name in bad else value for name, value in metrics.items()}
        if bad:
            line["nonfinite"] = bad
        with storage.refused_writes(self._metrics_path, CheckpointError):
            self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self._on_board(lambda: self._add_scalars(step, metrics))
        shown = "  ".join(f"{n} {_short(n, metrics[n])}" for n in _SHOWN if n in metrics)
        if "loss" in metrics:
            self._bar.update(self._task, description=f"loss {metrics['loss']:.3f}")
        self.note(f"step {step}  {shown}")

    def histograms(self, step: int, values: Mapping[str, Tensor]) -> None:
        """Write one histogram of TensorBoard for each name."""
        self._on_board(
            lambda: [self._board.add_histogram(k, v.float(), step) for k, v in values.items()]
        )

    def sample(self, step: int, text: str) -> None:
        """Write generated text to samples/ and TensorBoard."""
        folder = self.run / "samples"
        with storage.refused_writes(folder, CheckpointError):
            folder.mkdir(exist_ok=True)
            storage.write_bytes_atomic(folder / f"{_sample_name(step)}.txt", text.encode())
        self._on_board(lambda: self._board.add_text("sample", _verbatim(text), step))

    def sync(self) -> None:
        """Bring metrics.jsonl to the disk, before a checkpoint says that these steps are done."""
        with storage.refused_writes(self._metrics_path, CheckpointError):
            os.fsync(self._metrics.fileno())
        self._on_board(lambda: self._board.flush())

    def _open_board(self, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.run / "tb"
        purge = start + 1 if folder.exists() else None
        self._board = SummaryWriter(str(folder), purge_step=purge)

    def _add_scalars(self, step: int, metrics: Mapping[str, float | int]) -> None:
        for name, value in metrics.items():
            if name in _TAGS or "/" in name:
                self._board.add_scalar(_TAGS.get(name, name), value, step)

    def finish(self, config: Mapping[str, Any], figures: Mapping[str, float | int]) -> None:
        """Write the recipe with the last figures to TensorBoard's table of hyperparameters.

        By hand: ``SummaryWriter.add_hparams`` would open a second writer, whose steps no resumed
        run could take back.
        """

        def write() -> None:
            from torch.utils.tensorboard.summary import hparams

            table = {name: v for name, v in _flat(config).items() if isinstance(v, _PLAIN)}
            metrics = {f"final/{name}": float(value) for name, value in figures.items()}
            for summary in hparams(table, metrics):
                self._board.file_writer.add_summary(summary)
            for name, value in metrics.items():
                self._board.add_scalar(name, value, self._steps)

        self._on_board(write)

    def _on_board(self, action: Callable[[], Any]) -> None:
        """Do something with TensorBoard; when its disk fails, say so once and train on."""
        if not self._board_works:
            return
        try:
            action()
        except OSError as reason:
            self._board_works = False
            self.note(f"{self.run / 'tb'}: got {reason}; training goes on without TensorBoard")


class Silent:
    """Takes the place of a ``Monitor`` in all processes but the first."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def scalars_of(histograms: Mapping[str, Tensor]) -> dict[str, float]:
    """One number for each histogram: the mean; of half-lives, few of which are huge, the median."""
    return {
        name: float(x.float().median() if name.startswith("half_life/") else x.float().mean())
        for name, x in histograms.items()
    }


def note(run: Path, text: str) -> None:
    """Write a line to a run's log.txt while no ``Monitor`` holds it.

    Raises:
        CheckpointError: The disk refuses it.
    """
    path = run / "log.txt"
    with storage.refused_writes(path, CheckpointError), open(path, "a", encoding="utf-8") as log:
        log.write(_dated(text))


def _dated(text: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"


def say(text: str) -> None:
    """Print a line for the user; standard output is left to results."""
    print(text, file=sys.stderr, flush=True)


def cut_metrics(path: Path, step: int) -> None:
    """Drop the lines of metrics.jsonl after ``step``, and a last line that a kill cut."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    storage.write_bytes_atomic(path, b"".join(kept))


def _sample_name(step: int) -> str:
    return f"step-{step:08d}"


_PLAIN = (bool, int, float, str)


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists become text."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = str(value) if isinstance(value, list | tuple) else value
    return flat


def _short(name: str, value: float | int) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if name == "tokens_per_s":
        return f"{value:,.0f}"
    return f"{value:.2e}" if name == "lr" else f"{value:.4f}"


def _verbatim(text: str) -> str:
    """Markdown of text as it is: TensorBoard renders text as Markdown."""
    return "\n".join("    " + line for line in text.splitlines())
