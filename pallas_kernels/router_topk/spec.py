"""How a router turns logits into experts and weights: static facts that kernel and reference are built from."""

import math
from dataclasses import dataclass

SCORES = ("softmax", "sigmoid", "sqrt_softplus")


@dataclass(frozen=True)
class Routing:
    """The K experts of a token and their weights, from the logits z [E] of all; hashable, a static argument.

    Scores s are softmax(z), sigmoid(z) or sqrt(softplus(z)), in float32. The experts are the K largest of s (plus a
    bias [E] that has no part in the weights, if `route` is given one); weights are their s, divided and scaled:
    scale * s / (sum(s^norm)^(1 / norm) + epsilon).

    Args:
      k: experts a token.
      score: one of `SCORES`.
      over_chosen: the experts are the K largest logits and the weights the softmax of these alone (gpt-oss); `score` is
        then what is reported of all experts.
      rounded: dtype name that scores are rounded to before experts are chosen and weighed (DBRX), or None.
      norm: p of the norm that the weights are divided by, 1 for their sum; None: not divided.
      epsilon: added to that norm.
      scale: factor on the weights.
      weights: dtype name of the weights that are returned.

    Raises:
      ValueError: an unknown score, k < 1, a norm that is no positive number, or a combination without meaning.
    """

    k: int
    score: str = "softmax"
    over_chosen: bool = False
    rounded: str | None = None
    norm: float | None = None
    epsilon: float = 0.0
    scale: float = 1.0
    weights: str = "float32"

    def __post_init__(self):
        if self.score not in SCORES:
            raise ValueError(f"score = {self.score!r}: must be one of {', '.join(SCORES)}")
        if self.k < 1:
            raise ValueError(f"k = {self.k}: must be at least 1")
        if self.norm is not None and not 0 < self.norm < math.inf:
            raise ValueError(f"norm = {self.norm!r}: must be a positive number, or None")
        if self.over_chosen and (self.norm is not None or self.rounded is not None):
            raise ValueError("over_chosen: the weights are a softmax already; leave out norm and rounded")
