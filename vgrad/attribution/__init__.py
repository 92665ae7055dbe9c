"""Attribution: the training samples that made a prediction.

A score is for a query and a training sample, `[Q, N]`, and is positive where the sample
is helpful: it raises the log likelihood, or the measurement, of the query.

* `influence`: inner products of gradients through an inverse curvature
* `self_influence`: the same of each sample with itself
* `trak`: random projections of margins' gradients, and their kernel
* `margin`: the log odds of the target, a measurement
* `Top`: the largest scores of each query
* `Store`: features of a training set, in files
"""

from vgrad.attribution.scores import Top, influence, margin, self_influence, trak
from vgrad.attribution.store import Store

__all__ = [
    "Store",
    "Top",
    "influence",
    "margin",
    "self_influence",
    "trak",
]


def __dir__() -> list[str]:
    return __all__
