"""Comparisons: what simple models and a general compressor reach on the same text."""
