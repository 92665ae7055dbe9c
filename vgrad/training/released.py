"""The publishable part of a private run: parameters, buffers and the plan's claim."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vgrad import files
from vgrad.dp import Plan, PrivateGradients
from vgrad.dp.accounting import LEAST_RATE, Steps
from vgrad.dp.plan import check_spent
from vgrad.torch_private import shards
from vgrad.training.state import TrainState

MODEL = "model.safetensors"
CLAIM = "privacy.json"


def release(
    folder: Path | str, state: TrainState | PrivateGradients, plan: Plan | None = None
) -> None:
    """Write parameters and buffers with the plan's claim of privacy, and nothing else.

    `model.safetensors` holds the tensors by name, for `safetensors.torch.load_file` and
    any other reader of the format, and the claim in its metadata. `privacy.json` is the
    claim for people: epsilon, delta, mu, neighbours, mechanism, and how many steps of
    which sampling rate and noise multiplier, earlier plans and the releases of others
    included (correlated noise is one step of all batches, or of each round of groups).
    There is no key, no loss, norm or count of clipped samples, no optimizer state and
    no order of data; nor the size of the data set, in which neighbours differ. `save`
    writes the secret key: never publish its files.

    The folder is new or empty, and is there with both files or not at all. The same
    state gives the same bytes. `PrivateGradients` has its plan; a `TrainState` needs
    the plan of its steps, whose digest it carries. Sharded states go through
    `distributed.gather`, for one rank to write.

    The claim covers one release of one run. Releases of several runs on one data set,
    such as the members of an ensemble, add up. It covers private steps alone: anything
    that `train_step` and a buffer have learned from private data is released as it is,
    and a key from a seed that can be guessed hides nothing.

    Raises:
        ValueError: the steps were not taken under this plan, there are none, or epsilon
            is infinite.
        FileExistsError: there is something in the folder, or a file by its name.
        ImportError: `dp-accounting` is not installed.

    Example:
        >>> import tempfile
        >>> import safetensors.torch
        >>> import torch
        >>> from vgrad import optim
        >>> from vgrad.training import private_step
        >>> plan = Plan(100, 0.1, 1.0, max_norm=1.0, steps=10, delta=1e-5)
        >>> step = private_step(lambda p, b, x: p["w"] @ x, optim.sgd(0.1), plan)
        >>> state = TrainState.create(optim.sgd(0.1), {"w": torch.zeros(2)}, {})
        >>> state, _ = step(state, torch.ones(9, 2))
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     release(f"{parent}/model", state, plan)
        ...     safetensors.torch.load_file(f"{parent}/model/model.safetensors").keys()
        dict_keys(['w'])
    """
    if isinstance(state, PrivateGradients):
        if plan is not None:
            raise TypeError(
                "release(folder, state, plan): expected no plan beside a "
                "PrivateGradients, which has its own, got one. Leave it out."
            )
        plan = state.plan
        # Parameters and buffers by their first names, as a module loads them.
        saved = state.model.state_dict()
        buffers = {n: x for n, x in state.model.named_buffers() if n in saved}
        tensors = {**dict(state.model.named_parameters()), **buffers}
    elif isinstance(state, TrainState):
        tensors = {**state.params, **state.buffers}
    else:
        raise TypeError(
            f"release(folder, state): expected the TrainState of a private run, or its "
            f"PrivateGradients, got a {type(state).__name__}."
        )
    if not isinstance(plan, Plan):
        raise TypeError(
            f"release(folder, state, plan): expected the dp.Plan under which the steps "
            f"of the state were taken, got a {type(plan).__name__}."
        )
    if sharded := [n for n, x in tensors.items() if shards.is_distributed(x)]:
        raise TypeError(
            f"release(folder, state): expected plain tensors, got a DTensor in "
            f"{sharded[0]!r}. Pass distributed.gather(state, mesh), on one rank."
        )
    text = json.dumps(_claim(state, plan), indent=2)
    metadata = {"format": "pt", "privacy": text}
    tensors = {name: files.plain(value) for name, value in tensors.items()}
    model = files.serialized(MODEL, tensors, metadata)
    contents = {MODEL: model, CLAIM: [f"{text}\n".encode()]}
    files.new_folder(Path(folder), contents)


def _claim(state: TrainState | PrivateGradients, plan: Plan) -> dict[str, Any]:
    function = "release(folder, state, plan)"
    if isinstance(state.step, Tensor) and state.step.ndim:
        raise TypeError(
            f"{function}: expected the state of one run, got several that are stacked, "
            f"{tuple(state.step.shape)}. Release one by one; their claims add up."
        )
    steps = int(state.step)
    check_spent(function, plan, state.plan_digest, steps)
    if not state.plan_digest.any():
        raise ValueError(
            f"{function}: expected a state that has taken private steps, got one that "
            f"has taken none, of which there is nothing to claim. "
            f"safetensors.torch.save_file(state.params, path) writes it."
        )
    epsilon = plan.epsilon(steps)
    if not math.isfinite(epsilon):
        raise ValueError(
            f"{function}: expected a plan of a finite epsilon, got {epsilon} after "
            f"{steps} steps. A plan without noise claims nothing."
        )
    unit, count = {}, plan.samples_per_unit
    if count is not None:
        unit["unit"] = f"a person or group, at most {count} samples of it in a step"
    mu, names = plan.mu(steps), ("mu", "mu_from_false_positive_rate")
    gaussian = zip(names, (mu, LEAST_RATE), strict=True) if mu < math.inf else ()
    events = [{"words": x.words, "account": _rows(x.steps)} for x in plan.all_events]
    return {
        "epsilon": epsilon,
        "delta": plan.delta,
        **dict(gaussian),
        "neighbours": plan.neighbours,
        **unit,
        "mechanism": ", then ".join(dict.fromkeys(_mechanisms(plan, steps))),
        "steps": steps,
        "account": _rows(plan.account(steps)),
        **({"events": events} if events else {}),
        "accountant": plan.accountant,
    }


def _rows(account: Sequence[Steps]) -> list[dict[str, Any]]:
    """List terms of an account without the size of the data set."""
    rows = []
    for term in account:
        numbers = {name: getattr(term, name) for name in Steps._fields[:3]}
        cut = {} if term.truncated is None else {"largest_batch": term.truncated[0]}
        rows += [numbers | cut] if term.steps else []
    return rows


def _mechanisms(plan: Plan, steps: int) -> list[str]:
    """Describe the noise and the batches of the plans under which steps were taken."""
    earlier = []
    if plan.before is not None:
        earlier = _mechanisms(plan.before, min(steps, plan.earlier_steps))
        if steps <= plan.earlier_steps:
            return earlier
    kind = "Gaussian" if plan.discrete is False else "Discrete Gaussian"
    noise = f"{kind} noise"
    if plan.noise.correlated:
        noise += f" correlated by {plan.noise}"
    return [*earlier, f"{noise} on clipped sums of {plan.mechanism.batches}"]
