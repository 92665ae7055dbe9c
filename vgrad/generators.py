"""Random numbers from secret keys and their streams, or from torch's generators.

The numbers for one purpose (a batch, the noise of one parameter) at one step come from
a stream of their own, whose key is a keyed hash (BLAKE2b) of purpose and step. No
stream reveals another, and a resumed run or a part of a tensor draws the same numbers.
"""

import hashlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

from vgrad import checks, devices
from vgrad.torch_private import autograd
from vgrad.torch_private.kernels import default_generator

Tag = str | int | float
"""A part of the purpose of a stream."""

RandomState = tuple[Tensor, dict[torch.device, Tensor]]

KEY_BYTES = 32

BLOCK = 2**16
"""Numbers of one stream that are drawn at once, from a counter of their own."""

RNG_LOCK = threading.RLock()
"""Held by any thread that borrows torch's generators, a module, or caught warnings.

These exist once per process; two locks could be taken in two orders. Code that draws
from torch's generators without it, as a model with dropout does, is not kept out.
A fork waits for it, since no thread that holds it would be in the other process.
"""
if hasattr(os, "register_at_fork"):  # which Windows lacks
    for _lock in (autograd._LOCK, RNG_LOCK):  # the last one is taken first
        os.register_at_fork(before=_lock.acquire, after_in_child=_lock.release)
        os.register_at_fork(after_in_parent=_lock.release)


def secret_key(*, seed: int | None = None, member: int = 0) -> Tensor:
    """Draw a key, uint8 `[32]`, from the operating system.

    The key gives away all batches and all noise drawn from it: keep it with the
    private data. With a `seed` the key is a hash of `seed` and `member`. That is
    for tests and for public data: seeds can be guessed, so noise from such a key hides
    nothing.

    Raises:
        ValueError: `seed` or `member` is not a whole number of zero or more.

    Example:
        >>> torch.equal(secret_key(), secret_key())
        False
        >>> torch.equal(secret_key(seed=1), secret_key(seed=1))
        True
    """
    [member] = checks.integers("secret_key", minimum=0, member=member)
    if seed is None:
        return from_bytes(secrets.token_bytes(KEY_BYTES))
    [seed] = checks.integers("secret_key", minimum=0, seed=seed)
    return from_bytes(_digest(b"", ("seed", seed, member), KEY_BYTES))


def fold_in(key: Tensor, *tags: Tag) -> Tensor:
    """Derive a key: of a part of a run, uint8 `[32]`, or of streams of samples, int64.

    A secret key takes any tags. Keys of samples (`sample_keys`) take one, a whole
    number, and hide nothing.
    """
    if isinstance(key, Tensor) and key.dtype == torch.int64:
        [tag] = tags
        return splitmix64(key + _signed((int(tag) + 1) * _TO_PLACE))
    return from_bytes(_digest(_bytes(key), tags, KEY_BYTES))


def stream(key: Tensor, *tags: Tag) -> int:
    """Derive the key of one stream, a number of 128 bits."""
    return int.from_bytes(_digest(_bytes(key), tags, 16), "little")


def block(stream: int, number: int) -> np.random.Generator:
    """Return the generator of one block of a stream: Philox4x64-10."""
    # In the highest word of the counter, which the draws of a block never reach.
    # Neighbours in the lowest word would share most of their numbers.
    counter = np.array([0, 0, 0, number], dtype=np.uint64)
    # numpy documents seeds of any class, and annotates one.
    seed: Any = _Key(stream)
    return np.random.Generator(np.random.Philox(seed, counter=counter))


class _Key(ISeedSequence):
    # Besides a `key` numpy draws a seed of the system.
    def __init__(self, stream: int) -> None:
        self._words = np.array([stream % 2**64, stream >> 64], dtype=np.uint64)

    def generate_state(self, n_words: int, dtype: object = np.uint32) -> np.ndarray:
        return self._words


def drawn(draw: Callable[..., object], stream: int, count: int) -> np.ndarray:
    """Fill an array, float64 `[count]`, by a method of numpy's generators."""
    numbers = np.empty(count)
    works = (
        partial(draw, block(stream, start // BLOCK), out=numbers[start : start + BLOCK])
        for start in range(0, count, BLOCK)
    )
    on_threads(works, count)
    return numbers


def on_threads(works: Iterable[Callable[[], object]], count: int) -> None:
    """Draw `count` numbers in pieces of work, on as many threads as torch has."""
    # Each draws a block at least: to start threads takes as long as to draw one.
    threads = min(count // BLOCK, torch.get_num_threads())
    if threads < 2:
        for work in works:
            work()
        return
    queue = iter(list(works))  # each thread takes the next one

    def run() -> None:
        for work in queue:
            work()

    # This thread works too, so that no processor gets two of them.
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(run) for _ in range(threads - 1)]
        run()
    for other in others:
        other.result()  # its exception is raised here


def torch_seed(key: Tensor, *tags: Tag) -> int:
    """Derive a seed of 64 bits for a generator of torch, where only torch can draw."""
    # On the CPU torch uses 32 of them: enough for dropout, too few for a secret.
    return stream(key, *tags) % 2**64


def sample_keys(seed: int, start: int, size: int, device: Any = "cpu") -> Tensor:
    """Return keys of the samples `start` to `start + size` of a batch, int64 `[size]`.

    They follow from `seed`, 64 bits, and each sample's place in the whole batch.
    """
    places = torch.arange(start + 1, start + size + 1, device=device)
    return splitmix64(places * _STRIDE + _signed(seed))


def random_bits(streams: Tensor, count: int) -> Tensor:
    """Return the first 64-bit numbers of streams `[B]`, int64 `[B, count]`."""
    places = torch.arange(1, count + 1, device=streams.device)
    return splitmix64(places * _STRIDE + streams.unsqueeze(-1))


def hashed_bits(key: bytes, count: int, device: torch.device) -> Tensor:
    """Return 64-bit numbers that follow from 16 bytes, int64 `[count]`, on a device."""
    places = torch.arange(1, count + 1, device=device) * _STRIDE
    halves = (int.from_bytes(key[n : n + 8], "little") for n in (0, 8))
    one, other = (splitmix64(places + _signed(half)) for half in halves)
    return one.bitwise_xor_(other)


def unit(bits: Tensor, digits: int, dtype: torch.dtype) -> Tensor:
    """Make numbers of so many bits in [0, 1); `bits` is overwritten."""
    bits >>= 64 - digits
    bits &= 2**digits - 1
    return bits.to(dtype).mul_(2.0**-digits)


def splitmix64(numbers: Tensor) -> Tensor:
    """Hash numbers of 64 bits in place: the last step of SplitMix64, its variant 13.

    Reference: Steele, Lea and Flood, Fast splittable pseudorandom number generators,
    https://doi.org/10.1145/2660193.2660195.
    """
    for shift, factor in _MIXING:
        shifted = numbers >> shift
        shifted &= 2 ** (64 - shift) - 1  # no copies of the sign
        numbers ^= shifted
        numbers *= factor
    return numbers


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


_STRIDE = _signed(0x9E3779B97F4A7C15)
_TO_PLACE = 0xD1342543DE82EF95
_MIXING = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
_MIXING += ((31, 1),)


def check_key(function: str, key: Tensor) -> None:
    """Refuse anything but a key, with a TypeError."""
    # The argument may be a secret in another form: no message shows it.
    got = f"a {type(key).__name__}"
    if isinstance(key, Tensor):
        if key.dtype == torch.uint8 and key.shape == (KEY_BYTES,):
            return
        got = f"a tensor of {key.dtype} {tuple(key.shape)}"
    raise TypeError(
        f"{function}(key): expected a key as vgrad.dp.secret_key() draws one, or "
        f"the key of a state, got {got}."
    )


def random_state(tensors: Iterable[Tensor]) -> RandomState:
    """Return the state of the generators that computing with `tensors` may use."""
    states = {
        device: default_generator(device).get_state()
        for device in devices.accelerators(tensors)
    }
    return torch.get_rng_state(), states


def set_random_state(state: RandomState) -> None:
    """Restore the generators."""
    torch.set_rng_state(state[0])
    for device, of_device in state[1].items():
        default_generator(device).set_state(of_device)


def set_seed(seed: int, tensors: Iterable[Tensor]) -> None:
    """Start the generators that computing with `tensors` may use from a seed."""
    torch.default_generator.manual_seed(seed)
    for device in devices.accelerators(tensors):
        default_generator(device).manual_seed(seed)


@contextmanager
def kept_random_state(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the generators after a block that computes with `tensors`."""
    with RNG_LOCK:
        state = random_state(tensors)
        try:
            yield
        finally:
            set_random_state(state)


def drawn_since(before: RandomState, tensors: Iterable[Tensor]) -> bool:
    """Return whether random numbers were drawn."""
    after = random_state(tensors)
    return not torch.equal(before[0], after[0]) or any(
        not torch.equal(state, after[1][device]) for device, state in before[1].items()
    )


def _digest(key: bytes, tags: tuple[Tag, ...], size: int) -> bytes:
    text = _AS_TEXT(tags).encode("utf-8", "surrogatepass")  # halves of characters too
    return hashlib.blake2b(text, key=key, digest_size=size).digest()


_AS_TEXT = json.JSONEncoder(ensure_ascii=False).encode
"""Writes no two places alike."""


def _bytes(key: Tensor) -> bytes:
    check_key("generators", key)
    return key.cpu().numpy().tobytes()


def from_bytes(data: bytes) -> Tensor:
    """Return bytes as a tensor, uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
