"""Parameters that are not trained: moved among the buffers."""

from vgrad import names
from vgrad.names import Patterns
from vgrad.typing import Buffers, Params


def freeze(
    params: Params, buffers: Buffers, patterns: Patterns
) -> tuple[Params, Buffers]:
    """Move the parameters that match a shell-style pattern among the buffers.

    The moved tensors are detached; nothing is copied, the given dictionaries stay.

    Raises:
        ValueError: a pattern matches no parameter.
        TypeError: the patterns are one string.

    Example:
        >>> import torch
        >>> params = {"encoder.weight": torch.ones(2), "head.weight": torch.ones(2)}
        >>> trained, constant = freeze(params, {}, ["encoder.*"])
        >>> list(trained), list(constant)
        (['head.weight'], ['encoder.weight'])
    """
    names.check("freeze", patterns=patterns)
    moved = set(names.all_matched("freeze", params, patterns))
    kept = {name: value for name, value in params.items() if name not in moved}
    frozen = {name: params[name].detach() for name in params if name in moved}
    return kept, {**buffers, **frozen}
