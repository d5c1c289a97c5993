"""``gla doctor --recommend``: which mixers for which task and length, and why.

Each piece of advice says what it rests on: "arithmetic" follows from sizes alone; "published" is a
measurement that others report, with the place; "rule of thumb" is practice without a measurement
of ours or one that can be named, and wants a trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

Task = Literal["language-model", "recall", "classify"]

TASKS: tuple[Task, ...] = get_args(Task)
SHORT, LONG = 2048, 8192  # tokens
_D_MODEL = 512  # of the examples


class Advice(NamedTuple):
    """One rule.

    Attributes:
        advice: What to do.
        evidence: Why.
        basis: "arithmetic", "published" or "rule of thumb".
        source: Where it is published, or "".
    """

    advice: str
    evidence: str
    basis: str
    source: str = ""


def recommend(seq_len: int, task: Task) -> dict[str, Any]:
    """Return ``layers``, a pattern to start from, and ``advice``, in the order of its weight.

    Args:
        seq_len: Tokens of a document.
        task: "language-model": text in general; "recall": facts that must be found again in the
            context, word by word; "classify": one answer a document, read in both directions.
    """
    rules = _classify(seq_len) if task == "classify" else _generate(seq_len, task)
    layers = _layers(seq_len, task)
    return {
        "seq_len": seq_len,
        "task": task,
        "layers": layers,
        "advice": [r._asdict() for r in rules],
    }


def describe(figures: Mapping[str, Any]) -> list[str]:
    """Return what ``recommend`` says as lines for a reader."""
    lines = [
        f"{figures['task']}, {figures['seq_len']:,} tokens: start from "
        f"layers = {figures['layers']!r}".replace("'", '"')
    ]
    for rule in figures["advice"]:
        source = f", {rule['source']}" if rule["source"] else ""
        lines += [f"- {rule['advice']}", f"    {rule['evidence']} [{rule['basis']}{source}]"]
    return lines


def _layers(seq_len: int, task: str) -> list[str]:
    if task == "classify":
        return ["softmax*4"] if seq_len <= LONG else ["(linear*3, longformer)*2"]
    if seq_len <= SHORT:
        return ["softmax*8"] if task == "recall" else ["(gla*3, softmax)*2"]
    return ["(gla, softmax)*4"] if task == "recall" else ["(gla*3, softmax)*2"]


def _generate(seq_len: int, task: str) -> list[Advice]:
    share = seq_len / (seq_len + 12 * _D_MODEL)
    cache = 2 * seq_len * _D_MODEL * 2
    state = _D_MODEL * 32 * 4
    rules = [
        Advice(
            f"full softmax takes about {share:.0%} of a layer's work at this length",
            f"a token costs T D multiply-adds in causal attention and 12 D^2 in the other maps; "
            f"here D = {_D_MODEL}; SDPA does not keep the T * T scores",
            "arithmetic",
        ),
        Advice(
            f"a softmax layer caches {cache / 2**20:,.1f} MiB a sequence, a linear one "
            f"{state / 2**20:,.2f} MiB whatever the length",
            f"2 T D numbers of bf16, against D * 32 of fp32 (gla, heads of 64), D = {_D_MODEL}",
            "arithmetic",
        ),
    ]
    if seq_len <= SHORT:
        rules.append(
            Advice(
                "at this length choose by quality, not by speed, and measure",
                "where a linear layer becomes faster depends on the machine: python "
                "tools/bench_op.py times both",
                "rule of thumb",
            )
        )
    if seq_len > LONG:
        rules.append(
            Advice(
                "above 8,192 tokens let most layers be linear",
                "the first question is the length, the second whether far tokens must be matched "
                "one by one (softmax) or summed up (linear), the third whether near ones suffice "
                "(window)",
                "rule of thumb",
            )
        )
    if task == "recall":
        rules += [
            Advice(
                "keep softmax layers, one in two to one in four",
                "recall rises as there are fewer than three linear layers to one of softmax, while "
                "the loss on text hardly depends on the ratio (72 models)",
                "published",
                "arXiv 2507.06457",
            ),
            Advice(
                "do not expect exact recall from a constant state alone",
                "340M parameters, FDA / SWDE / SQuAD: Transformer 21.4 / 42.2 / 22.1, GLA 8.1 / "
                "18.6 / 27.2, RetNet 2.9 / 13.3 / 27.6",
                "published",
                "arXiv 2312.06635",
            ),
        ]
    else:
        rules += [
            Advice(
                "three linear layers to one of full softmax, the softmax last of each four",
                "validation perplexity by ratio: 3:1 5.65, 1:1 5.66, 7:1 5.70, 15:1 5.82, softmax "
                "alone 5.77",
                "published",
                "Kimi Linear report, 2025",
            ),
            Advice(
                "softmax in the first layers only is a choice to compare, not the default",
                "spread through the depth it does better than at the front",
                "published",
                "arXiv 2510.04800, known to us secondhand",
            ),
        ]
    return [
        *rules,
        Advice(
            "give the recurrence a gate a key channel",
            "training perplexity of 340M parameters after 7B tokens: no gate 23.21, fixed 16.55, a "
            "number a token 15.56, a vector a token 14.77",
            "published",
            "arXiv 2312.06635",
        ),
        Advice(
            "low rank needs its block-causal form here: linformer_causal, not linformer",
            "every slot of Linformer sums over all positions, so masking cannot make it causal",
            "arithmetic",
        ),
    ]


def _classify(seq_len: int) -> list[Advice]:
    k = 256
    rules = [
        Advice(
            'read in both directions: an encoder, [objective] kind = "classify"',
            "one answer a document needs no state and no order of reading; positions are added to "
            "the embeddings",
            "arithmetic",
        ),
        Advice(
            f"linformer with k = {k} does {min(1.0, k / seq_len):.0%} of softmax's score work here",
            "T * k against T * T; it adds 2 k T parameters a layer, takes no document longer than "
            "n_max, and k = T is softmax only if E is the identity",
            "arithmetic",
            "arXiv 2006.04768",
        ),
    ]
    if seq_len <= LONG:
        rules.append(
            Advice(
                "start with softmax; below 512 tokens low rank saves next to nothing",
                "SDPA is exact and keeps no T * T scores; the low-rank forms pay off only where k "
                "is far below T",
                "rule of thumb",
            )
        )
    else:
        rules.append(
            Advice(
                "above 8,192 tokens: linear layers, with longformer ones where near tokens must be "
                "matched",
                "linear attention and longformer take any length; Linformer's E and F are made for "
                "one, and grow with it",
                "rule of thumb",
            )
        )
    return [
        *rules,
        Advice(
            "where tokens must be aligned one by one, neither linformer nor nystrom",
            "both read a document through a fixed number of means; exact matches are lost in them",
            "rule of thumb",
        ),
        Advice(
            "with little data freeze E and F, or share them over layers",
            "a frozen random projection keeps inner products by the Johnson-Lindenstrauss lemma; "
            "shared, there are 2 k T fewer numbers to learn for each layer",
            "arithmetic",
            "arXiv 2006.04768",
        ),
        Advice(
            "E and F at 0.1 to 0.5 times the learning rate, with a longer warm-up",
            "recipes/encoder-mlm-stdlib.toml does so; python tools/bench_encoders.py compares "
            "mixers on one task",
            "rule of thumb",
        ),
    ]
