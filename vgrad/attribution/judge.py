"""Judges of scores: models retrained on parts of the data, samples with wrong labels.

N training samples, Q queries, S subsets of the training samples.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.functional.losses import check_loss, returned
from vgrad.optim import GradientTransformation
from vgrad.training import EnsembleState, ensemble_train_step
from vgrad.tree import double, map_values
from vgrad.typing import Buffers, LossFn, Params, Tree


def lds(scores: Tensor, subsets: Tensor, outputs: Tensor) -> Tensor:
    """Linear datamodeling score: rank correlation with retrained models, float64 [Q].

    For each query, the sums of its scores `[Q, N]` over subsets, bool `[S, N]`, are
    correlated with `outputs` `[S, Q]` of models that were trained on these subsets (by
    `retrain`): 1 is best, 0 is chance. Outputs are of the kind that the scores explain,
    such as log p of the right class where positive scores are helpful ones. Its mean
    over queries is the LDS of TRAK's authors.

    Needs scipy: `pip install "vgrad[dp]"`.

    Raises:
        ValueError: shapes do not fit, a number is not finite, a subset is empty, or a
            query has the same sum or output for all subsets, and so no ranks.

    Reference: Park et al., arXiv 2303.14186.

    Example:
        >>> scores = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
        >>> subsets = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 0]]) == 1
        >>> lds(scores, subsets, torch.tensor([[0.3], [0.5], [0.4]]))
        tensor([0.5000], dtype=torch.float64)
    """
    stats = checks.package("scipy.stats", "dp")
    chosen = _chosen("lds", "[S, N]", subsets=subsets).double()
    queries = torch.as_tensor(scores).shape[:1]
    sums = chosen @ _numbers("lds", (*queries, chosen.shape[1]), scores=scores).mT
    results = _numbers("lds", (len(chosen), *queries), outputs=outputs)
    for name, values in {"scores": sums, "outputs": results}.items():
        spread = values.amax(0) - values.amin(0)
        if bool((same := spread <= 1e-12 * values.abs().amax(0)).any()):
            raise ValueError(
                f"lds({name}): expected numbers that differ between subsets, got the "
                f"same one for all {len(values)} at query {int(same.int().argmax())}. "
                f"Leave it out, or draw other subsets."
            )
    pairs = zip(sums.mT.numpy(), results.mT.numpy(), strict=True)
    found = [stats.spearmanr(*pair).statistic for pair in pairs]
    return torch.tensor(found, dtype=torch.float64)


def retrain(
    loss: LossFn,
    tx: GradientTransformation,
    params: Params,
    buffers: Buffers,
    batch: tuple[Tree, ...],
    subsets: Tensor,
    *,
    steps: int,
    batch_size: int | None = None,
    seed: int,
) -> Params:
    """Train a model on each subset, bool `[S, N]`, as one ensemble: `-> [S, ...]`.

    All members start from `params`, and `batch` holds all N samples, `(x, y)`. A step
    of a member minimises the mean of `loss`, of one sample, over the samples of its
    subset: all of them, or its part of the next `batch_size` samples in an order that
    follows from `seed`, new in each epoch, and is the same for all members, as random
    numbers of the loss are. Members without a sample there skip the step. Weight decay
    of the objective belongs into the loss. Members do not depend on each other: subsets
    may be trained part by part.

    Cost: as `ensemble_train_step` on S batches of `batch_size` samples, whatever the
    size of the subsets.

    Raises:
        ValueError: subsets do not fit the samples, or one is empty.
        FloatingPointError: a step of a member has gradients that are not finite.

    Example:
        >>> import vgrad
        >>> x, y = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([0.0, 1.0, 5.0])
        >>> def loss(params, buffers, x, y):
        ...     return (params["w"] * x - y).square().sum() / 2
        >>> subsets = torch.tensor([[1, 1, 0], [0, 1, 1]]) == 1
        >>> start = {"w": torch.zeros(1)}
        >>> tx = vgrad.optim.sgd(1.0)
        >>> retrain(loss, tx, start, {}, (x, y), subsets, steps=1, seed=0)
        {'w': tensor([[0.5000],
                [3.0000]])}
    """
    check_loss("retrain", loss)
    read = batches.read("retrain", batch)
    subsets = _chosen("retrain", "[S, N]", subsets=subsets)
    if subsets.shape[1] != read.size:
        raise ValueError(
            f"retrain(subsets): expected a column for each of the {read.size} samples "
            f"of the batch, got {subsets.shape[1]}."
        )
    [steps] = checks.whole("retrain", least=1, steps=steps)
    at_once = read.size if batch_size is None else batch_size
    [at_once] = checks.whole("retrain", least=1, batch_size=at_once)
    [seed] = checks.whole("retrain", least=0, seed=seed)

    def one(params: Params, buffers: Buffers, *tensors: Tensor) -> Tensor:
        found = loss(params, buffers, *read.sample(tensors))
        return returned("retrain", found, has_aux=False)[0]

    def mean(params: Params, buffers: Buffers, /, *tensors: Tensor) -> Tensor:
        *samples, chosen = tensors
        dims = (None, None, *(0 for _ in samples))
        each = torch.vmap(one, dims, randomness="different")
        losses = each(params, buffers, *samples)
        return torch.where(chosen, losses, 0).sum() / chosen.sum()

    def rows() -> Iterator[Tensor]:
        source = torch.Generator().manual_seed(seed)
        while True:
            yield from torch.randperm(read.size, generator=source).split(at_once)

    def copies(value: Tensor) -> Tensor:
        return value.detach().expand(len(subsets), *value.shape).clone()

    dims = (*(None for _ in read.tensors), 0)
    # The numbers of a member must not depend on how many others are trained beside it.
    step = ensemble_train_step(mean, tx, in_dims=dims, randomness="same", donate=True)
    start = (map_values(copies, each) for each in (params, buffers))
    state = EnsembleState.create(tx, *start, seed=seed)
    skipped = torch.zeros_like(state.active, dtype=torch.float32)
    for _, at in zip(range(steps), rows(), strict=False):
        chosen = subsets[:, at].to(state.active.device)
        state = state._replace(active=chosen.any(1))
        state, metrics = step(state, *read.take(at).tensors, chosen)
        skipped += metrics["skipped"]
    if bool(skipped.any()):
        member = int(skipped.argmax())
        raise FloatingPointError(
            f"retrain(loss): expected finite gradients, got others in "
            f"{int(skipped[member])} of {steps} steps of subset {member}. Choose a "
            f"smaller learning rate."
        )
    return state.params


def mislabelled_auc(scores: Tensor, mislabelled: Tensor) -> float:
    """Area under the ROC curve of scores `[N]` for mislabelled samples, bool `[N]`.

    It is the probability that a mislabelled sample has a higher score than another one,
    half of it where they are equal: 1 is best, 0.5 is chance. `self_influence` has such
    scores. Needs scipy: `pip install "vgrad[dp]"`.

    Raises:
        ValueError: shapes do not fit, a number is not finite, or all samples are
            mislabelled, or none.

    Example:
        >>> mislabelled = torch.tensor([True, False, True, False])
        >>> mislabelled_auc(torch.tensor([3.0, 1.0, 2.0, 2.0]), mislabelled)
        0.875
    """
    stats = checks.package("scipy.stats", "dp")
    wrong = _chosen("mislabelled_auc", "[N]", mislabelled=mislabelled)
    values = _numbers("mislabelled_auc", wrong.shape, scores=scores)
    if bool(wrong.all()):
        raise ValueError(
            f"mislabelled_auc(mislabelled): expected some samples that are not, got "
            f"{len(wrong)} that are."
        )
    pair = values[wrong].numpy(), values[~wrong].numpy()
    return float(stats.mannwhitneyu(*pair).statistic) / (len(pair[0]) * len(pair[1]))


def _chosen(function: str, shape: str, **values: Any) -> Tensor:
    """Return which samples are chosen, one at least in each row; refuse others."""
    [(name, value)] = values.items()
    boolean = isinstance(value, Tensor) and value.dtype == torch.bool
    if not boolean or value.ndim != 1 + shape.count(","):
        raise ValueError(
            f"{function}({name}): expected a boolean tensor {shape}, got "
            f"{checks.shown(value)}."
        )
    if not value.shape[0] or not bool(value.any(-1).all()):
        raise ValueError(
            f"{function}({name}): expected a sample at least in each row, got none."
        )
    return value.cpu()


def _numbers(function: str, shape: tuple[int, ...], **values: Any) -> Tensor:
    """Return numbers as float64 on the CPU; refuse NaN, infinity and other shapes."""
    [(name, value)] = values.items()
    real = isinstance(value, Tensor) and value.is_floating_point()
    if not real or value.shape != shape:
        raise ValueError(
            f"{function}({name}): expected floating-point numbers {tuple(shape)}, got "
            f"{checks.shown(value)}."
        )
    if not bool((finite := value.isfinite()).all()):
        raise ValueError(
            f"{function}({name}): expected finite numbers, got "
            f"{int((~finite).sum())} that are not."
        )
    return double(value.detach()).cpu()
