"""The section [objective]: what a model learns, and so which model it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gla.errors import ConfigError
from gla.models.config import ModelConfig
from gla.models.encoder import EncoderConfig
from gla.train.section import Count, Section

_ONLY = {"mask_fraction": "masked", "min_documents": "classify", "exclude": "classify"}


class ObjectiveConfig(Section):
    """What is learned.

    Attributes:
        kind: "next_token": a language model; "masked": an encoder that fills in masked tokens;
            "classify": an encoder that tells the class of a chunk of ``train.seq_len`` tokens, the
            first folder of its document's name.
        mask_fraction: Of "masked": share of the tokens that is asked for.
        min_documents: Of "classify": training documents that a folder needs to be a class. Not
            used where ``model.classes`` names the classes.
        exclude: Of "classify": folders that are no class.
        pretrained: A run whose weights an encoder starts from, all but the head for classes.
    """

    kind: Literal["next_token", "masked", "classify"] = "next_token"
    mask_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    min_documents: Count = 10
    exclude: list[str] = Field(default=[])
    pretrained: str | None = None

    @model_validator(mode="after")
    def _belongs(self) -> ObjectiveConfig:
        for key, kind in _ONLY.items():
            if self.kind != kind and getattr(self, key) != type(self).model_fields[key].default:
                raise ConfigError(
                    f"{key}: got {getattr(self, key)!r} with kind = {self.kind!r}, expected none; "
                    f"fix with kind = {kind!r}, or leave {key} out"
                )
        if self.kind == "next_token" and self.pretrained is not None:
            raise ConfigError(
                f"pretrained: got {self.pretrained!r} with kind = 'next_token', expected none; fix "
                "by leaving it out"
            )
        return self


class RecipeModel(ModelConfig):
    """The [model] section. Without ``vocab_size``, the model takes the size of the tokenizer."""

    vocab_size: Count | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class EncoderRecipeModel(EncoderConfig, RecipeModel):
    """The [model] section of an encoder. ``classes`` may be found in the data."""

    vocab_size: Count | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


def encoder_recipe(table: Mapping[str, Any]) -> RecipeModel:
    """Check a table [model] as that of an encoder.

    Raises:
        ConfigError: one line for each fault.
    """
    return EncoderRecipeModel(**table)
