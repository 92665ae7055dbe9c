"""What all threads of a process share, for one thread at a time."""

import threading

ALONE = threading.RLock()
"""Held by who borrows torch's own generators, or catches warnings.

Both are one for the whole process: a second thread that sets a generator in between, or
draws from it, would change the numbers of the first, and leave it in the wrong state.
It is one lock for both, since two could be taken in two orders. What draws from torch's
generators without it, as a plain call of a model with dropout does, is not kept out.
"""
