"""How a token is drawn from a row of logits, on the host."""

from superfluid_workerd.sampling.draws import uniform
from superfluid_workerd.sampling.sampler import Drawn, Sampler, Scored

__all__ = ["Drawn", "Sampler", "Scored", "uniform"]
