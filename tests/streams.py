"""The reference for what is drawn by a key: hashes and ciphers, written out once more.

It shares no code with the package.
"""

import hashlib
import json
import math

import numpy as np
import torch

BLOCK = 2**16
"""Numbers of a batch that are drawn from a counter of their own."""

TILE = 512
"""Numbers of noise whose radii come before their angles."""


def digest(key, place, size):
    text = json.dumps(list(place), ensure_ascii=False)
    text = text.encode("utf-8", "surrogatepass")
    found = hashlib.blake2b(text, key=bytes(key), digest_size=size).digest()
    return list(found)


def philox(key, *place):
    """Yield the generators of a stream's blocks."""
    stream = sum(byte << 8 * i for i, byte in enumerate(digest(key, place, 16)))
    number = 0
    while True:
        yield np.random.Generator(np.random.Philox(key=stream, counter=number << 192))
        number += 1


def filled(count, draw, key, *place):
    """Draw so many numbers block by block."""
    sizes = [min(BLOCK, count - start) for start in range(0, count, BLOCK)]
    parts = [
        draw(source, n) for source, n in zip(philox(key, *place), sizes, strict=False)
    ]
    return np.concatenate([np.zeros(0), *parts])


def chacha20(key, nonce, first, blocks):
    """Return blocks of the cipher as RFC 8439 has them, uint32 `[blocks, 16]`."""
    state = np.zeros((16, blocks), np.uint32)
    state[:4] = np.frombuffer(b"expand 32-byte k", np.uint32)[:, None]
    state[4:12] = np.frombuffer(bytes(key), np.uint32)[:, None]
    state[12] = np.arange(first, first + blocks)
    state[13:] = np.frombuffer(bytes(nonce), np.uint32)[:, None]
    words = state.copy()

    def quarter(*place):
        a, b, c, d = place
        for into, other, turned, by in (
            *((a, b, d, 16), (c, d, b, 12)),
            *((a, b, d, 8), (c, d, b, 7)),
        ):
            words[into] += words[other]
            mixed = words[turned] ^ words[into]
            words[turned] = (mixed << np.uint32(by)) | (mixed >> np.uint32(32 - by))

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return (words + state).T.copy()


def normal(words):
    """Make normal numbers, `[tiles, 512]`, of blocks of a cipher: Box and Muller."""
    words = words.view(np.uint64).reshape(-1, 2, TILE // 2)
    first, second = words[:, 0], words[:, 1]
    # From zero, without it, to one, with it.
    fine = (2**11 - (second & np.uint64(2**11 - 1))).astype(float)
    coarse = (first & np.uint64(2**63 - 1)).astype(float)
    radii = np.sqrt(-2 * np.log((coarse + fine * 2.0**-11) * 2.0**-63))
    angles = 2 * np.pi * (second.view(np.int64) >> 11) * 2.0**-53
    return np.concatenate([radii * np.cos(angles), radii * np.sin(angles)], 1)


def noise(key, step, name, shape, *, multiplier, sensitivity, member=0, tags=None):
    """Return the noise of one entry in float64, before it is rounded."""
    deviation, count = multiplier * sensitivity, math.prod(shape)
    tags = [float(multiplier), deviation] if tags is None else tags
    place = ["noise", member, name, str(list(shape)), *tags, 0]
    own, nonce = digest(key, place, 32), bytes(4) + step.to_bytes(8, "little")
    blocks = math.ceil(count / TILE) * (TILE // 8)
    drawn = normal(chacha20(own, nonce, 0, blocks)).reshape(-1)[:count]
    return torch.from_numpy(deviation * drawn).reshape(shape)


def batch(key, step, size, rate):
    """Return the indices of a Poisson batch."""
    drawn = filled(size, lambda source, n: source.random(n), key, "batch", step)
    return [row for row in range(size) if drawn[row] < rate]


def of_plan(key, plan):
    """Return the key that a plan derives."""
    fields = [
        plan["dataset_size"],
        *(float(plan[name]) for name in ("sampling_rate", "noise_multiplier")),
        float(plan["max_norm"]),
    ]
    return digest(key, fields, 32)


def shuffle(key, step):
    """Return the generator of the batch of a run without privacy."""
    words = digest(key, ["batch", step], 16)[:8]
    seed = sum(byte << 8 * i for i, byte in enumerate(words))
    return torch.Generator().manual_seed(seed)
