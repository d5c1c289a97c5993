"""Triton kernels of the gated linear attention op.

They take plain tensors and never import ``gla``; see ``kernels/README.md``.
"""
