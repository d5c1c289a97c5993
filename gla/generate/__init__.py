"""Generation: sessions that read and write text from a constant-size state, and sampling."""

from gla.generate.sampling import Sampling, probabilities, sample
from gla.generate.session import Session

__all__ = ["Sampling", "Session", "probabilities", "sample"]
