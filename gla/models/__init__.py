"""Models: named mixers in a pattern, between an embedding and a head."""
