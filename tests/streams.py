"""The reference for what is drawn by a key: hashes and Philox, written out once more.

It shares no code with the package.
"""

import hashlib
import json
import math

import numpy as np
import torch

BLOCK = 2**16


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


def normal(source, count):
    """Draw one block of normal numbers: Box and Muller, cosines before sines.

    Small numbers under the logarithm are drawn again, finer by ten bits.
    """
    pairs = (count + 1) // 2
    under, turns = source.random(pairs), source.random(pairs)
    fine, again = 2.0**-10, under < 2.0**-10
    while again.any():
        under[again] = fine * source.random(int(again.sum()))
        fine *= 2.0**-10
        again = under < fine
    radii, angles = np.sqrt(-2 * np.log(under)), 2 * np.pi * turns
    return np.concatenate([radii * np.cos(angles), radii * np.sin(angles)])[:count]


def noise(key, step, name, shape, *, multiplier, sensitivity, member=0):
    """Return the noise of one entry in float64, before it is rounded."""
    own = digest(key, ["noise", step, float(multiplier), multiplier * sensitivity], 32)
    count = math.prod(shape)

    drawn = filled(count, normal, own, member, name, *shape)
    return torch.from_numpy(multiplier * sensitivity * drawn).reshape(shape)


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
