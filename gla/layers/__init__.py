"""Layers: token mixers and the parts they are made of.

Importing the package registers the mixers that come with gla; see ``mixer.register_mixer``.
"""

from gla.layers.linear_attention import LinearAttention, LinearAttentionConfig
from gla.layers.mixer import register_mixer
from gla.layers.softmax_attention import SoftmaxAttention, SoftmaxAttentionConfig

register_mixer("linear_attention", LinearAttentionConfig, LinearAttention)
register_mixer("softmax_attention", SoftmaxAttentionConfig, SoftmaxAttention)
