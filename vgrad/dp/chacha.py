"""ChaCha20, the stream cipher whose words noise is made of, on any device.

A stream has a key of 256 bits, a nonce for each step and a counter of blocks, 64 bytes
each: any part of it can be drawn alone. On hosts OpenSSL draws, by the package
`cryptography`. Where it is not installed, and on devices, ops of tensors draw the same
words. K steps, N tiles of blocks.

Reference: Nir and Langley, RFC 8439, https://www.rfc-editor.org/rfc/rfc8439.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import ciphers
except ImportError:  # an environment for GPUs may lack it
    ciphers = None

BLOCKS = 64
"""Blocks of a tile."""

BYTES = 64 * BLOCKS
"""Bytes of a tile."""

TILES = 2**32 // BLOCKS
"""Tiles of a key: its counter of blocks has 32 bits."""

_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)


def has_openssl() -> bool:
    """Return whether OpenSSL is here, and has the cipher (a build for FIPS has not)."""
    if ciphers is None:
        return False
    try:
        _encryptor(bytes(32), bytes(16))
    except UnsupportedAlgorithm:
        return False
    return True


def fill(words: Tensor, key: bytes, step: int, tile: int) -> None:
    """Fill memory of the host, int64 `[N, 2, 256]`, with tiles of a stream."""
    start = (tile * BLOCKS).to_bytes(4, "little") + bytes(4)
    memory = words.view(-1).view(torch.uint8).numpy()
    memory.fill(0)  # it encrypts zeros
    _encryptor(key, start + step.to_bytes(8, "little")).update_into(memory, memory)


def _encryptor(key: bytes, start: bytes) -> Any:
    algorithm = ciphers.algorithms.ChaCha20(key, start)  # pyright: ignore
    return ciphers.Cipher(algorithm, None).encryptor()  # pyright: ignore


def nonces(steps: Tensor) -> Tensor:
    """Return the nonces of steps, int64 `[K]` -> int32 `[K, 3]`: 32 zeros, the step."""
    return F.pad(steps.view(torch.int32).view(-1, 2), (1, 0))


def keystream(
    keys: Tensor, nonces: Tensor, tiles: Tensor, *, unrolled: bool = False
) -> Tensor:
    """Draw tiles of streams by ops of tensors, int64 `[K, N, 2, 256]`.

    Each tile has a key, int32 `[N, 8]`, and a number, int64 `[N]`. Some 550 ops; where
    they are compiled, `unrolled` ones become a single kernel, four times as many.
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
    lanes = 4 if unrolled else 1
    start = rows if unrolled else [*torch.stack(rows).view(4, 4, *shape)]
    a, b, c, d = (start[i : i + lanes] for i in range(0, 4 * lanes, lanes))
    for _ in range(10):
        a, b, c, d = _quarters(a, b, c, d)
        b, c, d = (_turned(row, by) for row, by in ((b, 1), (c, 2), (d, 3)))
        a, b, c, d = _quarters(a, b, c, d)
        b, c, d = (_turned(row, by) for row, by in ((b, 3), (c, 2), (d, 1)))
    words = [x + y for x, y in zip([*a, *b, *c, *d], start, strict=True)]
    words = torch.stack(words, -1) if unrolled else torch.cat(words).movedim(0, -1)
    return words.contiguous().view(torch.int64).view(steps, size, 2, 4 * BLOCKS)


def _quarters(*rows: list[Tensor]) -> list[list[Tensor]]:
    """Mix the four words of each column."""
    lanes = []
    for a, b, c, d in zip(*rows, strict=True):
        a = a + b
        d = _rotated(d ^ a, 16)
        c = c + d
        b = _rotated(b ^ c, 12)
        a = a + b
        d = _rotated(d ^ a, 8)
        c = c + d
        b = _rotated(b ^ c, 7)
        lanes.append((a, b, c, d))
    return [*map(list, zip(*lanes, strict=True))]


def _rotated(words: Tensor, by: int) -> Tensor:
    high = words << by
    low = (words >> (32 - by)) & (2**by - 1)  # no copies of the sign
    return high | low


def _turned(row: list[Tensor], by: int) -> list[Tensor]:
    """Bring diagonals into columns, or back."""
    return row[by:] + row[:by] if len(row) > 1 else [row[0].roll(-by, 0)]
