"""Gaussian noise on sums, sized by the sensitivity that comes with the sum.

What the noise protects against, and what it does not. The guarantee of the accountant
is one about real numbers and a perfect source of randomness. This file has neither:

* The draws come from torch's generators, which are statistical and not cryptographic.
  Whoever learns the state of one learns the noise.
* Sums and noise are floating-point numbers, and nothing here is hardened against
  attacks on the gaps between them: arXiv 2112.05307 reports up to 92.56 % success
  against DP-SGD.
* In float32, torch makes normal numbers from uniform ones of 24 bits, so that none is
  beyond 5.77 standard deviations; the missing mass is 8e-9, which matters for a `delta`
  near 1e-8. Sums in float64 get noise from 53 bits.
* Losses, gradient norms and the fraction of clipped samples are not private, however
  much noise the sum gets. Do not publish them.

The released parameters are meant for people who do not control the machine that trains
and do not look into its memory.
"""

import math
import secrets
from typing import Any

import torch
from torch import Tensor

from vgrad import checks
from vgrad.persample.sensitivity import Sensitivity
from vgrad.tree import map_values
from vgrad.typing import Params

# Where the state of a CPU generator holds the 624 words of the Mersenne Twister, each
# of 32 bits in a field of 64.
_WORD_COUNT = 624
_WORDS = slice(24, 24 + 8 * _WORD_COUNT)


def generator(
    device: torch.device | str = "cpu", *, seed: int | None = None
) -> torch.Generator:
    """Make a generator on `device`, seeded by the operating system.

    Without a seed no two generators are alike: the seed has 64 bits from the operating
    system, and on the CPU, where torch uses only 32 bits of a seed, the whole state of
    19968 bits is filled as well. A seed is for tests: whoever knows it can subtract the
    noise.

    Raises:
        ValueError: `seed` is not a whole number of zero or more.

    Example:
        >>> torch.equal(
        ...     torch.randn(3, generator=generator()),
        ...     torch.randn(3, generator=generator()),
        ... )
        False
    """
    made = torch.Generator(device)
    if seed is not None:
        checks.whole("generator", least=0, seed=seed)
        return made.manual_seed(seed)
    made.manual_seed(secrets.randbits(64))
    if made.device.type == "cpu":
        _fill_state(made)
    return made


def _fill_state(generator: torch.Generator) -> None:
    """Replace every word of a CPU generator's state by one of the operating system.

    2^32 seeds can all be tried by someone who knows the data set but for one sample.
    """
    state = generator.get_state()
    words = bytearray(secrets.token_bytes(4 * _WORD_COUNT))
    fields = torch.frombuffer(words, dtype=torch.uint32).to(torch.int64)
    state[_WORDS] = fields.view(torch.uint8)
    generator.set_state(state)


def add_gaussian_noise(
    sums: Params,
    sensitivity: Sensitivity,
    *,
    noise_multiplier: float,
    generator: torch.Generator,
) -> Params:
    """Add independent noise to every entry. {name: shape} -> {name: shape}.

    The noise is N(0, (noise_multiplier * sensitivity.value)^2), drawn once per call:
    call this once per step, on the sum over the whole batch, also when that batch is
    empty. All tensors are served from the one stream of `generator`, in the order of
    the dictionary, so their noise is independent. Nothing is changed but the state of
    the generator, and what is not finite in the sums stays as it is.

    The noise and the result are `promote_types(dtype, float32)`: sums of half
    precision come back as float32. A noise multiplier of zero adds nothing, and the
    accountant then answers with an infinite epsilon.

    Raises:
        TypeError: `sensitivity` is a bare number, or a tensor is not of real floats.
        ValueError: the sensitivity is infinite, the noise multiplier negative or not
            finite, or a tensor is on another device than the generator.

    Reference:
        Abadi et al., arXiv 1607.00133.

    Example:
        >>> sums = {"weight": torch.zeros(2, dtype=torch.bfloat16)}
        >>> source = torch.Generator().manual_seed(0)
        >>> noisy = add_gaussian_noise(
        ...     sums, Sensitivity(0.5), noise_multiplier=2.0, generator=source
        ... )
        >>> noisy["weight"]
        tensor([ 1.5410, -0.2934])
    """
    function = "add_gaussian_noise"
    check_sensitivity(function, sensitivity)
    checks.non_negative(function, noise_multiplier=noise_multiplier)
    checks.finite(function, noise_multiplier=noise_multiplier)
    for name, total in sums.items():
        _check_sum(function, name, total, generator)
    scale = noise_multiplier * sensitivity.value

    def add(total: Tensor) -> Tensor:
        dtype = torch.promote_types(total.dtype, torch.float32)
        noise = torch.randn(
            total.shape, generator=generator, device=total.device, dtype=dtype
        )
        return total.to(dtype) + scale * noise

    return map_values(add, sums)


def check_sensitivity(function: str, sensitivity: Any) -> None:
    """Refuse what is no `Sensitivity`, and an infinite one."""
    if not isinstance(sensitivity, Sensitivity):
        kind = type(sensitivity).__name__
        raise TypeError(
            f"{function}(sensitivity={sensitivity!r}): expected the Sensitivity of the "
            f"sum, got a {kind}. Take the one that comes with the sum, "
            "clipped_grad(...).sensitivity."
        )
    if not math.isfinite(sensitivity.value):
        raise ValueError(
            f"{function}(sensitivity={sensitivity!r}): expected a finite sensitivity, "
            f"got {sensitivity.value}. Clip the gradients with a finite max_norm."
        )


def _check_sum(
    function: str, name: str, total: Tensor, generator: torch.Generator
) -> None:
    if not total.is_floating_point():
        raise TypeError(
            f"{function}(sums[{name!r}]): expected a tensor of real floating-point "
            f"numbers, got {total.dtype}. Noise is for sums of gradients."
        )
    if total.device != generator.device:
        raise ValueError(
            f"{function}(sums[{name!r}]): expected a tensor on the generator's device "
            f"{generator.device}, got {total.device}. Make the generator with "
            f"vgrad.dp.generator({str(total.device)!r})."
        )
