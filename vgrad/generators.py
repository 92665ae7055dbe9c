"""Random numbers as a function of a key, so that what a step drew it draws again.

A run keeps one secret key of 256 bits. What it draws for one purpose (a batch, the
noise of one parameter, dropout) at one step comes from a stream of its own, whose key
is a keyed hash (BLAKE2b) of the purpose and the step. No stream tells anything about
another one, and none has to be read in order: a run that goes on, a worker that reads
ahead and a machine that holds a part of a tensor draw the very same numbers.
"""

import hashlib
import json
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from vgrad import checks

Place = str | int | float
"""A part of what a stream is for."""

KEY_BYTES = 32

BLOCK = 2**16
"""Numbers of one stream that are drawn at once, from a counter of their own."""


def secret_key(*, seed: int | None = None, member: int = 0) -> Tensor:
    """Draw a key, uint8 `[32]`, from the operating system.

    Who knows the key knows all batches and all noise that were drawn by it: keep it
    with the private data. With a `seed` the key is a hash of `seed` and `member`. That
    is for tests and for what is not private: seeds can be tried, so noise from such a
    key hides nothing.

    Raises:
        ValueError: `seed` or `member` is not a whole number of zero or more.

    Example:
        >>> torch.equal(secret_key(), secret_key())
        False
        >>> torch.equal(secret_key(seed=1), secret_key(seed=1))
        True
    """
    checks.whole("secret_key", least=0, member=member)
    if seed is None:
        return _tensor(secrets.token_bytes(KEY_BYTES))
    checks.whole("secret_key", least=0, seed=seed)
    return _tensor(_digest(b"", ("seed", seed, member), KEY_BYTES))


def subkey(key: Tensor, *place: Place) -> Tensor:
    """Derive a key for one part of a run, uint8 `[32]`.

    Raises:
        TypeError: `key` is not what `secret_key` returns.
    """
    return _tensor(_digest(_bytes(key), place, KEY_BYTES))


def stream(key: Tensor, *place: Place) -> int:
    """Derive the key of one stream, a number of 128 bits.

    Raises:
        TypeError: `key` is not what `secret_key` returns.
    """
    return int.from_bytes(_digest(_bytes(key), place, 16), "little")


def block(stream: int, number: int) -> np.random.Generator:
    """Return the generator of one block of a stream: Philox4x64-10.

    The number of the block is the highest word of the counter, which the draws of a
    block never reach. Neighbours in the lowest word would share most of their numbers.
    """
    return np.random.Generator(np.random.Philox(key=stream, counter=number << 192))


def drawn(
    draw: Callable[[np.random.Generator, np.ndarray], None], stream: int, count: int
) -> np.ndarray:
    """Fill an array, float64 `[count]`, block by block, on as many threads as torch.

    The numbers do not depend on how many threads there are.
    """
    found = np.empty(count)
    parts = [found[start : start + BLOCK] for start in range(0, count, BLOCK)]

    def fill(number: int) -> None:
        draw(block(stream, number), parts[number])

    if len(parts) < 2:
        for number in range(len(parts)):
            fill(number)
        return found
    with ThreadPoolExecutor(min(len(parts), torch.get_num_threads())) as pool:
        for _ in pool.map(fill, range(len(parts))):
            pass  # an exception in a thread is raised here
    return found


def torch_seed(key: Tensor, *place: Place) -> int:
    """Derive a seed of 64 bits for a generator of torch, for what only torch can draw.

    On the CPU torch uses 32 of them: enough for dropout, too few for a secret.
    """
    return stream(key, *place) % 2**64


def check_key(function: str, key: Tensor) -> None:
    """Refuse what is not a key.

    Raises:
        TypeError: `key` is not what `secret_key` returns.
    """
    if (
        not isinstance(key, Tensor)
        or key.dtype != torch.uint8
        or key.shape != (KEY_BYTES,)
    ):
        # What was passed may be a secret in another form: no message shows it.
        got = f"a {type(key).__name__}"
        if isinstance(key, Tensor):
            got = f"a tensor of {key.dtype} {tuple(key.shape)}"
        raise TypeError(
            f"{function}(key): expected a key as vgrad.dp.secret_key() draws one, or "
            f"that of a state, got {got}."
        )


def _digest(key: bytes, place: tuple[Place, ...], size: int) -> bytes:
    # JSON, so that no two places are written alike; halves of characters stay halves.
    text = json.dumps(place, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, key=key, digest_size=size).digest()


def _bytes(key: Tensor) -> bytes:
    check_key("generators", key)
    return key.cpu().numpy().tobytes()


def _tensor(key: bytes) -> Tensor:
    return torch.frombuffer(bytearray(key), dtype=torch.uint8)
