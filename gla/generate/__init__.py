"""Generation: sessions that read and write text from a constant-size state, and batches of them."""

from gla.generate.batch import Batch, read_together, write_together
from gla.generate.decoder import Decoder
from gla.generate.sampling import Sampling, probabilities, sample
from gla.generate.session import Mark, Score, Session
from gla.generate.writer import Request, Token

__all__ = [
    "Batch",
    "Decoder",
    "Mark",
    "Request",
    "Sampling",
    "Score",
    "Session",
    "Token",
    "probabilities",
    "read_together",
    "sample",
    "write_together",
]
