"""Normal numbers of keyed streams, in float64, by the formula of Box and Muller.

Two uniform numbers u and v give two normal ones,

    sqrt(-2 log u) cos(2 pi v)   and   sqrt(-2 log u) sin(2 pi v),

with cosine and sine from `t = tan(pi v)`: `2 / (1 + t^2) - 1` and `2 t / (1 + t^2)`,
which is faster with numpy. Where u is small it is drawn again, as a finer fraction: 43
of its bits count at any size, so the large numbers are as dense as the others, and none
is too large.

torch's functions are faster still, but those of MKL start threads of their own in every
thread that calls them, however few the numbers: two threads took ten times as long.

Reference: Box and Muller, Annals of Mathematical Statistics 29 (1958).
"""

import math

import numpy as np

from vgrad import generators

_SMALL = 2.0**-10
"""A uniform number below this one is drawn again, and multiplied by it."""


def draw(stream: int, number: int, count: int, deviation: float) -> np.ndarray:
    """Draw a block of a stream, `[count]`: first the cosines, then the sines."""
    source = generators.block(stream, number)
    radius, found = np.empty((count + 1) // 2), np.empty((2, (count + 1) // 2))
    cosine, sine = found
    source.random(out=radius)
    source.random(out=sine)
    _refine(radius, source)
    # All in place: a block stays in a cache.
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    radius *= deviation
    sine *= math.pi
    tangent = np.tan(sine, out=sine)
    np.multiply(tangent, tangent, out=cosine)
    cosine += 1
    np.divide(radius, cosine, out=cosine)
    cosine *= 2
    sine *= cosine
    cosine -= radius
    return found.reshape(-1)[:count]


def _refine(uniform: np.ndarray, source: np.random.Generator) -> None:
    """Draw small numbers again, until all are above zero and have bits that count."""
    below = _SMALL
    small = (uniform < below).nonzero()[0]
    while len(small):
        uniform[small] = below * source.random(len(small))
        below *= _SMALL
        small = small[uniform[small] < below]
