"""Samples of each member: bootstrap draws and cross-validation folds.

E members, K folds, n samples. Indices are int64, on the CPU, one row for each member;
`x[indices]` is its data `[E, size, ...]`, which `in_dims=0` gives to the members.
"""

import torch
from torch import Tensor

from vgrad import checks


def bootstrap_indices(
    members: int, n: int, *, size: int | None = None, seed: int
) -> Tensor:
    """Draw samples with replacement for each member: `-> [E, size]`, from 0 to n - 1.

    `size` is n by default: a member then sees a share of about `1 - 1/e = 63 %` of the
    samples, and the others can judge it. Training on such draws is known as bagging.
    `x[indices]` holds E copies of the data; if that is too much, index batch by batch.

    Reference: Breiman, Bagging Predictors, Machine Learning 24, 1996.

    Example:
        >>> bootstrap_indices(3, 5, seed=0).shape
        torch.Size([3, 5])
    """
    function = "bootstrap_indices"
    members, n = checks.integers(function, minimum=1, members=members, n=n)
    [size] = checks.integers(function, minimum=1, size=n if size is None else size)
    [seed] = checks.integers(function, minimum=0, seed=seed)
    source = torch.Generator().manual_seed(seed)
    return torch.randint(n, (members, size), generator=source)


def fold_indices(folds: int, n: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Split samples for cross-validation: `-> (train [K, ...], validation)`.

    The samples are shuffled and cut into K folds of `n // K`. Member k is validated on
    fold k and trained on all others. The remaining `n % K` samples are in no fold:
    every member is trained on them, so that all have equally many.

    Example:
        >>> train, validation = fold_indices(3, 7, seed=0)
        >>> train.shape, validation.shape
        (torch.Size([3, 5]), torch.Size([3, 2]))
    """
    [folds] = checks.integers("fold_indices", minimum=2, folds=folds)
    [seed] = checks.integers("fold_indices", minimum=0, seed=seed)
    [n] = checks.integers("fold_indices", minimum=1, n=n)
    if n < folds:
        raise ValueError(
            f"fold_indices(folds={folds}, n={n}): expected at least one sample a fold, "
            f"got {n} samples. Use fewer folds."
        )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    size = n // folds
    starts = range(0, folds * size, size)
    validation = torch.stack([order[start : start + size] for start in starts])
    train = torch.stack(
        [torch.cat([order[:start], order[start + size :]]) for start in starts]
    )
    return train, validation
