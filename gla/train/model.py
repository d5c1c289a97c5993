"""The model of a recipe, built, with faults that name the recipe's fields."""

from __future__ import annotations

from gla.errors import ConfigError
from gla.layers.linformer import LinformerConfig
from gla.models.encoder import Encoder, EncoderConfig
from gla.models.language_model import LanguageModel
from gla.train.config import RunConfig


def build_language_model(config: RunConfig) -> LanguageModel:
    """Build the [model] of a recipe that predicts the next token.

    Raises:
        ConfigError: A layer cannot do what its table asks.
    """
    try:
        return LanguageModel(config.model)
    except ConfigError as error:
        raise _in_recipe(error) from None


def build_encoder(config: RunConfig, model: EncoderConfig) -> Encoder:
    """Build an encoder.

    Args:
        config: The recipe.
        model: Its [model], with classes where it needs them.

    Raises:
        ConfigError: A layer cannot do what its table asks, or is made for shorter rows.
    """
    check_lengths(config)
    try:
        return Encoder(model)
    except ConfigError as error:
        raise _in_recipe(error) from None


def check_lengths(config: RunConfig) -> None:
    """Make sure that every Linformer takes the rows of training and of evaluation.

    Raises:
        ConfigError: One does not.
    """
    lengths = {"train.seq_len": config.train.seq_len, "eval.seq_len": config.eval.seq_len}
    for name in dict.fromkeys(config.model.layer_names):
        mixer = config.model.mixers[name]
        longest = mixer.longest if isinstance(mixer, LinformerConfig) else None
        for field, length in lengths.items():
            if longest is not None and length is not None and length > longest:
                raise ConfigError(
                    f"{field}: got {length}, expected at most n_max = {longest} of "
                    f"model.mixers.{name}; fix {field} or that n_max"
                )


def _in_recipe(error: ConfigError) -> ConfigError:
    return ConfigError("\n".join(f"model.{line}" for line in str(error).splitlines()))
