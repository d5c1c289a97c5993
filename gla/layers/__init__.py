"""Layers: token mixers and the parts they are made of.

Importing the package registers the mixers that come with gla; see ``mixer.register_mixer``.
"""

from gla.layers.hgrn2 import HGRN2, HGRN2Config
from gla.layers.linear_attention import LinearAttention, LinearAttentionConfig
from gla.layers.linformer import Linformer, LinformerConfig
from gla.layers.linformer_causal import LinformerCausal, LinformerCausalConfig
from gla.layers.mamba2 import Mamba2, Mamba2Config
from gla.layers.mixer import register_mixer
from gla.layers.nystrom import Nystrom, NystromConfig
from gla.layers.reformer import Reformer, ReformerConfig
from gla.layers.softmax_attention import SoftmaxAttention, SoftmaxAttentionConfig

register_mixer("hgrn2", HGRN2Config, HGRN2)
register_mixer("linear_attention", LinearAttentionConfig, LinearAttention)
register_mixer("mamba2", Mamba2Config, Mamba2)
register_mixer("reformer", ReformerConfig, Reformer)
register_mixer("linformer", LinformerConfig, Linformer)
register_mixer("linformer_causal", LinformerCausalConfig, LinformerCausal)
register_mixer("nystrom", NystromConfig, Nystrom)
register_mixer("softmax_attention", SoftmaxAttentionConfig, SoftmaxAttention)
