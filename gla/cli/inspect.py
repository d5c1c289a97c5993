"""``gla inspect RUN``: what goes on inside a run's model; tables, plots, a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gla.cli.arguments import Run, call, print_json
from gla.storage import make_folder


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    return call(inspect, "gla inspect", argv)


def inspect(
    run: Run,
    /,
    *,
    tokens: int = 2048,
    out: Path | None = None,
    device: str = "auto",
    impl: str | None = None,
    json: bool = False,
) -> int:
    """Look into the newest checkpoint of a run that verifies, on its validation text.

    A language model reads the first tokens of the split as one text, an encoder its first rows.

    Of each layer: standard deviation of the output, half-lives of the gates, effective rank of the
    attention and its singular values, size and rank of the state over positions, gradients of
    Linformer's projections, redraws of random features. As CSV, and PNG where matplotlib is there.

    Args:
        run: Folder of the run.
        tokens: How many tokens of the validation split to read.
        out: Folder for the tables and plots; RUN/inspect by default.
        device: auto, cpu, cuda, cuda:N or mps.
        impl: Form of the op in every mixer on it; as trained by default.
        json: Print one JSON object.
    """
    if out is not None:  # before anything is measured for it
        make_folder(out, "--out")
    facts = look_into(run, tokens, device, impl)
    folder = out or run / "inspect"
    drawn = write(folder, facts)
    if json:
        print_json({**summary(facts), "folder": str(folder)})
        return 0
    print("\n".join(describe(summary(facts))))
    print(f"tables {'and plots ' if drawn else ''}in {folder}")
    if not drawn:
        print("no plots: matplotlib is not installed; fix with pip install 'gla[plots]'")
    return 0


def look_into(run: Path, tokens: int, device: str, impl: str | None = None) -> dict[str, Any]:
    """Measure all that ``gla.models.diagnose`` knows on the first tokens of the validation split.

    Raises:
        ConfigError: No run there, no such device, or ``tokens`` below 2.
        DataError: The data are missing or damaged.
        CheckpointError: No checkpoint verifies.
    """
    import torch

    from gla.errors import ConfigError
    from gla.models import diagnose
    from gla.models.language_model import LanguageModel
    from gla.models.weights import find_checkpoint, require_run
    from gla.train.config import load_recipe
    from gla.train.device import resolve_device
    from gla.train.encoder_objective import load_encoder_batch
    from gla.train.inputs import open_inputs

    if tokens < 2:
        raise ConfigError(f"tokens: got {tokens}, expected at least 2; fix --tokens")
    place = resolve_device(device)
    require_run(run)
    config = load_recipe(run / "config.toml")
    checkpoint = find_checkpoint(run)
    val = open_inputs(config.data).val
    if config.objective.kind == "next_token":
        model: Any = LanguageModel.load(checkpoint, device=str(place), impl=impl)
        text = torch.from_numpy(val.ids(0, min(tokens, val.num_tokens)))
        text = text[None].to(place)
        ends = torch.tensor([0, text.shape[1]], device=place)
        growth = diagnose.state_growth(model, text)
        loss = partial(model.loss, text[:, :-1], text[:, 1:])
    else:
        model, text, ends, loss = load_encoder_batch(config, checkpoint, val, tokens, place, impl)
        growth = []
    seen = diagnose.look(model, text, ends)
    return {
        "checkpoint": checkpoint.name,
        "tokens": text.shape[1],
        "output_std": diagnose.output_std(seen),
        "output_norm": [
            n for n, m in diagnose.mixers(model).items() if getattr(m, "norm", None) is not None
        ],
        "half_lives": diagnose.half_lives(seen),
        "spectra": diagnose.singular_values(model, seen, int(ends[1])),
        "states": growth,
        "gradients": diagnose.projection_gradients(model, loss),
        "redraws": diagnose.redraws(model),
    }


def summary(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is printed: plain numbers by layer."""
    from gla.models.diagnose import STD_BAND, effective_rank

    std = facts["output_std"]
    last = {row.layer: row for row in facts["states"]}  # the last position stays
    return {
        "checkpoint": facts["checkpoint"],
        "tokens": facts["tokens"],
        "output_std": std,
        "output_norm": facts["output_norm"],
        "outside_band": [n for n, x in std.items() if not STD_BAND[0] <= x <= STD_BAND[1]],
        "half_life": {n: _quantiles(x) for n, x in facts["half_lives"].items()},
        "attention_rank": {n: float(effective_rank(x).mean()) for n, x in facts["spectra"].items()},
        "attention_tokens": next((x.shape[-1] for x in facts["spectra"].values()), 0),
        "state": {n: {"norm": row.norm, "rank": row.rank} for n, row in last.items()},
        "projection_gradient": facts["gradients"],
        "redraws": facts["redraws"],
    }


def describe(figures: Mapping[str, Any]) -> list[str]:
    """Return the figures of ``summary`` as lines for a reader."""
    lines = [f"{figures['checkpoint']}, {figures['tokens']:,} tokens of the validation text"]
    for layer, std in figures["output_std"].items():
        cells = [f"output std {std:.3f}" + ("!" if layer in figures["outside_band"] else "")]
        if life := figures["half_life"].get(layer):
            cells.append("half-life {p10:,.1f} / {p50:,.1f} / {p90:,.1f} tokens".format(**life))
        if (rank := figures["attention_rank"].get(layer)) is not None:
            cells.append(f"attention rank {rank:.1f} of {figures['attention_tokens']}")
        if state := figures["state"].get(layer):
            cells.append(f"state norm {state['norm']:.3g}, rank {state['rank']:.1f}")
        if (count := figures["redraws"].get(layer)) is not None:
            cells.append(f"{count} redraws")
        grads = figures["projection_gradient"].items()
        cells += [f"grad {n.rpartition('.')[2]} {g:.2e}" for n, g in grads if n.startswith(layer)]
        lines.append(f"{layer:<18} {', '.join(cells)}")
    if figures["half_life"]:
        lines.append("half-life: 10 %, 50 % and 90 % of a layer's gates are below these")
    outside, normed = set(figures["outside_band"]), set(figures["output_norm"])
    if outside - normed:
        lines.append("!: outside 0.5 to 2; an output norm or normalized q and k keep it inside")
    if outside & normed:
        lines.append("!: outside 0.5 to 2 behind an output norm: its weight, or the output gate's")
    return lines


def write(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Write the tables and, with matplotlib, the plots; return whether they were drawn."""
    from gla.compare.plots import write_csv, write_plot
    from gla.models.diagnose import STD_BAND, effective_rank

    folder.mkdir(parents=True, exist_ok=True)
    std = facts["output_std"]
    write_csv(folder / "output_std.csv", ["layer", "std"], list(std.items()))
    depth = list(range(len(std)))
    drawn = write_plot(
        folder / "output_std.png",
        {"output": (depth, list(std.values()))},
        title="Standard deviation of the mixers' outputs",
        x="block",
        y="std",
        log="y",
        band=STD_BAND,
    )
    small = {"gradients": "norm", "redraws": "count"}
    for name, column in small.items():
        if facts[name]:
            write_csv(folder / f"{name}.csv", ["parameter", column], list(facts[name].items()))
    if lives := {n: x.sort().values.tolist() for n, x in facts["half_lives"].items()}:
        rows = [
            (n, i / max(1, len(x) - 1), life) for n, x in lives.items() for i, life in enumerate(x)
        ]
        write_csv(folder / "half_life.csv", ["layer", "quantile", "tokens"], rows)
        write_plot(
            folder / "half_life.png",
            {n: ([i / max(1, len(x) - 1) for i in range(len(x))], x) for n, x in lives.items()},
            title="Half-lives of the gates",
            x="quantile",
            y="tokens",
            log="y",
        )
    if spectra := facts["spectra"]:
        ranks = {n: effective_rank(x).tolist() for n, x in spectra.items()}
        rows = [(n, h, rank) for n, heads in ranks.items() for h, rank in enumerate(heads)]
        write_csv(folder / "attention_rank.csv", ["layer", "head", "effective_rank"], rows)
        shares = {
            n: (x.cumsum(-1) / x.sum(-1, keepdim=True)).mean(0).tolist() for n, x in spectra.items()
        }
        rows = [
            (n, i + 1, value, shares[n][i])
            for n, x in spectra.items()
            for i, value in enumerate(x.mean(0).tolist())
        ]
        header = ["layer", "index", "singular_value", "cumulative_share"]
        write_csv(folder / "attention_spectrum.csv", header, rows)
        write_plot(
            folder / "attention_spectrum.png",
            {n: (list(range(1, len(x) + 1)), x) for n, x in shares.items()},
            title="Singular values of the attention, cumulated",
            x="index",
            y="share of the sum",
        )
    if facts["states"]:
        write_csv(
            folder / "state.csv", ["layer", "position", "norm", "effective_rank"], facts["states"]
        )
        for column, label in (("norm", "Frobenius norm"), ("rank", "effective rank")):
            lines: dict[str, tuple[list[float], list[float]]] = {}
            for row in facts["states"]:
                xs, ys = lines.setdefault(row.layer, ([], []))
                xs.append(row.position)
                ys.append(getattr(row, column))
            write_plot(
                folder / f"state_{column}.png",
                lines,
                title=f"States: {label}",
                x="tokens read",
                y=label,
                log="x",
            )
    return drawn


def _quantiles(values: Any) -> dict[str, float]:
    import torch

    points = torch.tensor([0.1, 0.5, 0.9], device=values.device)
    names = ("p10", "p50", "p90")
    return dict(zip(names, values.float().quantile(points).tolist(), strict=True))
