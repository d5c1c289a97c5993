"""Text that a model in training writes at each evaluation, for samples/ and TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gla.data.tokenizer import Tokenizer
    from gla.models.language_model import LanguageModel

_TOKENS = 200


def sampler(model: LanguageModel, tokenizer: Tokenizer) -> str:
    """Return the beginning of a document, as the model makes it up; the same seed each time."""
    from gla.generate.session import Session

    session = Session(model, tokenizer)
    return "".join(session.generate(max_new_tokens=_TOKENS, temperature=0.8, top_p=0.95, seed=0))
