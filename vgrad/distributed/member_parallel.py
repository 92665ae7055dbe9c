"""Steps and functions of an ensemble whose members are cut among ranks.

Every rank calls them with its own members. They differ from those of an ensemble in one
place in two things: what a member draws follows from its number among all members, and
gradients of what the members share are sums over all of them.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vgrad import files
from vgrad.distributed.options import Options
from vgrad.distributed.own_members import part
from vgrad.ensemble.axes import members, split
from vgrad.ensemble.forward import EnsembleForward
from vgrad.ensemble.gradients import EnsembleGradFn, EnsembleGrads
from vgrad.ensemble.per_sample import EnsemblePerSampleFn
from vgrad.generators import (
    kept_random_state,
    sample_keys,
    secret_key,
    set_seed,
    torch_seed,
)
from vgrad.ranks import Ranks
from vgrad.training.ensemble import EnsembleState, EnsembleStep
from vgrad.training.others import Found
from vgrad.tree import tensors, widened
from vgrad.typing import Arguments, Buffers, Params, Result, Same, Tree


def member_parallel(
    function: Callable[Arguments, Result],
    mesh: DeviceMesh,
    *,
    members: int,
    axis: str = "members",
) -> Same[Arguments, Result]:
    """Return a step or a function of an ensemble for ranks that have members each.

    `function` is what `ensemble_train_step`, `ensemble_forward`, `ensemble_grad`,
    `ensemble_per_sample_grad` or `ensemble_clipped_grad` returns, and the result is
    called as it is, with the members of this rank: a state, parameters and batches of
    their own that `own_members` cut, and batches that all members see as they are. So
    are the results: losses, skipped steps and loss scales are those of the rank's
    members. `members` says how many there are on all ranks. A step remains one that
    `vgrad.compile` takes.

    A member is trained as if all members were in one place. What it draws with
    `randomness="different"` follows from the state's key, the step and its number among
    all members, so that it is the same for any number of ranks (`alone` makes a mesh of
    one). A plain step draws other numbers, for all members from one stream; so does a
    compiled one here, for the members of a rank. Functions that have no state take
    their seed from torch's generator on the first rank.

    Gradients of parameters that match `shared` are summed over all ranks, and a step
    is skipped on all of them if the sum is not finite. Ranks that share nothing do not
    wait for each other in a step, nor do they notice when one of them fails.

    Cost: without `shared` nothing is sent in a step. With it two messages and a sum of
    those gradients; what buffers that are shared are left with is compared by a hash.
    Of members that draw random numbers together, most ops draw for all in one pass;
    those that follow neither uniform nor normal laws nor that of dropout run once for
    each member.

    Raises:
        TypeError: `function` is none of these.
        ValueError: there are fewer members than ranks; when called, if those given are
            not as many as this rank has.
        RankError: when called, if something is shared and another rank failed, is at
            another step or leaves other values in a buffer.

    Example:
        >>> import vgrad
        >>> from vgrad.distributed import all_members, alone, own_members
        >>> from vgrad.training import EnsembleState, ensemble_train_step
        >>> models = [torch.nn.Linear(2, 1) for _ in range(3)]
        >>> fmodel, params, buffers = vgrad.stack(models)
        >>> loss = vgrad.batch_loss(fmodel, torch.nn.functional.mse_loss)
        >>> tx = vgrad.optim.sgd(0.1)
        >>> whole = EnsembleState.create(tx, params, buffers, seed=0)
        >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
        >>> with alone("members") as mesh:
        ...     step = ensemble_train_step(loss, tx)
        ...     step = member_parallel(step, mesh, members=3)
        ...     state = own_members(whole, mesh)
        ...     state, metrics = step(state, x, y)
        ...     whole = all_members(state, mesh)
        >>> whole.params["weight"].shape, metrics["loss"].shape
        (torch.Size([3, 1, 2]), torch.Size([3]))
    """
    ranks = Ranks.of("member_parallel", mesh, axis)
    numbers = part(members, ranks.rank, ranks.size)
    return _of_some(function, OtherRanks(ranks, numbers, _options(function)))


def _options(function: Any) -> Options:
    """Read the options of a step or a function; clipping is that of each member."""
    if isinstance(function, EnsembleStep):
        parts: dict[str, Any] = {"tx": function.tx, "donate": function.donate}
        parts |= {"in_dims": function.in_dims, "loss_scale": function.first}
        function = function.gradient
    else:
        parts = {"kind": type(function).__name__}
    for name in ("randomness", "shared", "has_aux", "fmodel"):
        parts[name] = getattr(function, name, None)
    return Options(getattr(function, "loss", None), **parts)


def _of_some(function: Any, others: "OtherRanks") -> Any:
    """Return a step or a function of the members of this rank."""
    if isinstance(function, EnsembleStep):
        return replace(function, others=others)
    if isinstance(function, EnsembleForward):
        return ParallelForward(function, others)
    if isinstance(function, EnsembleGradFn | EnsemblePerSampleFn):
        return ParallelFunction(function, others)
    raise TypeError(
        f"member_parallel(function): expected what ensemble_train_step, "
        f"ensemble_forward, ensemble_grad, ensemble_per_sample_grad or "
        f"ensemble_clipped_grad returns, got a {type(function).__name__}. A step is "
        f"compiled afterwards."
    )


@dataclass(frozen=True)
class OtherRanks:
    """The members on other ranks.

    Attributes:
        ranks: all ranks of the ensemble.
        numbers: the numbers of this rank's members.
        options: those of the step or the function.
    """

    ranks: Ranks
    numbers: range
    options: Options

    def check(self, given: int) -> None:
        """Refuse other members than those of this rank."""
        if given != len(self.numbers):
            raise ValueError(
                f"member_parallel: expected the {len(self.numbers)} members of rank "
                f"{self.ranks.rank}, got {given}. Pass what own_members returns."
            )

    def joined(
        self, compute: Callable[[], Found], state: EnsembleState, shared: Sequence[str]
    ) -> tuple[Found, Tensor]:
        """Sum gradients of what is shared, and say whether any member is active."""
        with self.ranks.together("ensemble_train_step") as facts:
            self.check(len(state.active))
            result, aux = compute()
            facts["options"] = self.options
            facts["step"] = int(state.step)
            facts["buffers"] = _seen(result.buffers, shared)
        anyone = state.active.any()
        grads = {
            # A member stands in for those that are not active, who would all be here.
            name: torch.where(anyone, grad, 0)
            for name, grad in result.grads.items()
            if name in shared
        }
        grads, anyone = self.summed(grads, anyone)
        return (result._replace(grads={**result.grads, **grads}), aux), anyone

    def key(self, what: str) -> Tensor:
        """Draw a key on the first rank, which advances the generators of all ranks."""
        drawn = [int(each) for each in torch.randint(2**31, (2,))]
        notes = self.ranks.check_same(what, {"seed": drawn}, options=self.options)
        high, low = notes[0]["seed"]
        return secret_key(seed=high << 31 | low)

    def summed(self, grads: Params, anyone: Tensor) -> tuple[Params, Tensor]:
        """Sum gradients and count ranks, float32 or wider."""
        given = {f"grad {name}": widened(grad) for name, grad in grads.items()}
        given["ranks"] = anyone.to(self.ranks.device, torch.float32)
        found = self.ranks.summed("ensemble_train_step", given)
        sums = {name: found[f"grad {name}"].to(x.dtype) for name, x in grads.items()}
        return sums, (found["ranks"] > 0).to(anyone.device)


class ParallelFunction:
    """What `member_parallel` returns for a function of an ensemble."""

    def __init__(self, function: Any, others: OtherRanks) -> None:
        """Take a function of some of the members."""
        self._function = function
        self._others = others

    def __call__(
        self, params: Params, buffers: Buffers, /, *batch: Tree, **options: Any
    ) -> Any:
        """Run the members of this rank."""
        return self._run("__call__", params, buffers, batch, options)

    def _run(
        self,
        method: str,
        params: Params,
        buffers: Buffers,
        batch: tuple,
        options: dict[str, Any],
    ) -> Any:
        """Run the members of this rank; sum what is shared, if that is changed."""
        function, others, what = self._function, self._others, type(self).__name__
        sums = isinstance(function, EnsembleGradFn)
        drawing = function.randomness != "error"
        key = others.key(what) if drawing else None
        meets = function.shared and (sums or method == "with_buffers")
        with others.ranks.together(what) if meets else nullcontext({}) as facts:
            count = members(params, buffers, function.shared, function=what)
            others.check(count)
            found: Any = self._drawn(method, key, params, buffers, batch, options)
            whole = split(what, {**params, **buffers}, function.shared)[1]
            if meets:
                facts["options"] = others.options
                result: Any = found if isinstance(found, EnsembleGrads) else found[0]
                left: Any = result.buffers if sums else found[1]
                facts["buffers"] = _seen(left, [*whole])
        if not sums or not meets:
            return found
        grads = {name: x for name, x in result.grads.items() if name in whole}
        grads, _ = others.summed(grads, torch.tensor(True))
        result = result._replace(grads={**result.grads, **grads})
        return result if isinstance(found, EnsembleGrads) else (result, found[1])

    def _drawn(
        self,
        method: str,
        key: Tensor | None,
        params: Params,
        buffers: Buffers,
        batch: tuple,
        options: dict[str, Any],
    ) -> Any:
        """Run the members of this rank, from a key if they draw random numbers."""
        function, given = self._function, tensors((params, buffers))
        if key is None:
            return getattr(function, method)(params, buffers, *batch, **options)
        if function.randomness == "different":
            numbers = self._others.numbers
            seed = torch_seed(key, "members")
            keys = sample_keys(seed, numbers.start, len(numbers))
            function = function.keyed(keys)
        with kept_random_state(given):
            set_seed(torch_seed(key, "all"), given)
            return getattr(function, method)(params, buffers, *batch, **options)


class ParallelForward(ParallelFunction):
    """What `member_parallel` returns for `ensemble_forward`."""

    def with_buffers(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> tuple[Tree, Buffers]:
        """Return the outputs of this rank's members, and what they leave in buffers."""
        return self._run("with_buffers", params, buffers, batch, {})


def _seen(buffers: Buffers, shared: Sequence[str]) -> str:
    """Hash the buffers that are shared."""
    return files.digest({name: x for name, x in buffers.items() if name in shared})
