"""ChaCha20, the stream cipher whose words noise is made of, on any device.

A stream has a key of 256 bits, a nonce for each step and a counter of blocks, 64 bytes
each: any part of it can be drawn alone. On hosts OpenSSL draws, by the package
`cryptography`. Where it is not installed, and on devices, ops of tensors draw the same
words. K steps, N tiles of blocks.

Reference: Nir and Langley, RFC 8439, https://www.rfc-editor.org/rfc/rfc8439.
"""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.devices import HOST

try:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import ciphers
except ImportError:
    ciphers = None
    text = "expected the package cryptography, got none, and noise six times as slow"
    warnings.warn(f"vgrad.dp: {text}. Run pip install cryptography.", stacklevel=2)

BLOCKS = 64
"""Blocks of a tile."""

BYTES = 64 * BLOCKS
"""Bytes of a tile."""

TILES = 2**32 // BLOCKS
"""Tiles of a key: its counter of blocks has 32 bits."""

_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)


def fill(words: Tensor, key: bytes, step: int, tile: int) -> None:
    """Fill memory of the host, int64 `[N, 2, 256]`, with tiles of a stream."""
    start = (tile * BLOCKS).to_bytes(4, "little") + bytes(4)
    encryptor = _encryptor(key, start + step.to_bytes(8, "little"))
    if encryptor is None:
        keys = torch.frombuffer(bytearray(key), dtype=torch.int32).expand(len(words), 8)
        tiles = torch.arange(tile, tile + len(words), device=HOST)
        words.copy_(
            keystream(keys, nonces(torch.tensor([step], device=HOST)), tiles)[0]
        )
        return
    memory = words.view(-1).view(torch.uint8).numpy()
    memory.fill(0)  # it encrypts zeros
    encryptor.update_into(memory, memory)


def memory(tiles: int) -> Tensor:
    """Return memory of the host for words, int64 `[N, 2, 256]`."""
    return torch.from_numpy(np.empty((tiles, 2, 4 * BLOCKS), np.int64))  # large pages


def _encryptor(key: bytes, start: bytes) -> Any:
    """Return OpenSSL's cipher, None where there is none (as in a build for FIPS)."""
    if ciphers is None:
        return None
    try:
        algorithm = ciphers.algorithms.ChaCha20(key, start)  # pyright: ignore
        return ciphers.Cipher(algorithm, None).encryptor()  # pyright: ignore
    except UnsupportedAlgorithm:  # pyright: ignore
        return None


def nonces(steps: Tensor) -> Tensor:
    """Return the nonces of steps, int64 `[K]` -> int32 `[K, 3]`: 32 zeros, the step."""
    return F.pad(steps.view(torch.int32).view(-1, 2), (1, 0))


def keystream(
    keys: Tensor, nonces: Tensor, tiles: Tensor, *, unrolled: bool = False
) -> Tensor:
    """Draw tiles of streams by ops of tensors, int64 `[K, N, 2, 256]`.

    Each tile has a key, int32 `[N, 8]`, and a number, int64 `[N]`. Some 260 ops; where
    they are compiled, `unrolled` ones become a single kernel, nine times as many.
    """
    steps, size = len(nonces), len(keys)
    shape = (steps, size, BLOCKS)
    places = torch.arange(BLOCKS, dtype=torch.int32, device=keys.device)
    # Up to 2^32 - 1, as 32 bits without a sign.
    counters = (tiles * BLOCKS).to(torch.int32).unsqueeze(-1) + places
    rows = [
        *(keys.new_full((), number) for number in _CONSTANTS),
        *keys.T.unsqueeze(-1),
        counters,
        *nonces.T.reshape(3, steps, 1, 1),
    ]
    rows = [row.expand(shape) for row in rows]
    words = _words_by_one(rows) if unrolled else _words_by_four(torch.stack(rows))
    return words.view(torch.int64).view(steps, size, 2, 4 * BLOCKS)


def _words_by_one(start: list[Tensor]) -> Tensor:
    """Mix sixteen words, each a tensor `[...]`, into `[..., 16]`."""
    rows = list(start)
    for turned in (0, 1) * 10:  # columns, diagonals
        for column in range(4):
            a, b, c, d = (4 * row + (column + turned * row) % 4 for row in range(4))
            steps = (a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)
            for to, by, mixed, bits in steps:
                rows[to] = rows[to] + rows[by]
                word = rows[mixed] ^ rows[to]
                low = (word >> (32 - bits)) & (2**bits - 1)  # no copies of the sign
                rows[mixed] = (word << bits) | low
    return torch.stack([x + y for x, y in zip(rows, start, strict=True)], -1)


def _words_by_four(start: Tensor) -> Tensor:
    """Mix sixteen words, the four of a row by one op, `[16, ...]` into `[..., 16]`."""
    a, b, c, d = start = start.unflatten(0, (4, 4))
    for by in (1, 3) * 10:
        a = a + b
        d = _rotated(d, a, 16)[:4]
        c = c + d
        b = _rotated(b, c, 12)[:4]
        a = a + b
        d = _rotated(d, a, 8, copies=2)
        c = (c.expand(2, *c.shape) + d[:4]).flatten(0, 1)
        b = _rotated(b, c[:4], 7, copies=2)
        # Diagonals become columns, or columns diagonals: of two copies a view.
        b, c, d = b[by:][:4], c[2:][:4], d[4 - by :][:4]
    words = torch.stack([a, b, c, d]) + start
    return words.flatten(0, 1).movedim(0, -1).contiguous()


def _rotated(x: Tensor, y: Tensor, by: int, copies: int = 1) -> Tensor:
    """Rotate `x ^ y` to the left, in two ops, `[4, ...]` -> `[4 copies, ...]`."""
    pair = x.unsqueeze(-1).expand(*x.shape, 2) ^ y.unsqueeze(-1)
    both = pair.view(torch.int64).expand(copies, *x.shape, 1) >> (32 - by)
    return both.view(torch.int32)[..., 0].flatten(0, 1)
