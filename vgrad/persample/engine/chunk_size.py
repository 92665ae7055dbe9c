"""How many samples are computed at a time, by `chunk_size`."""

from vgrad import devices
from vgrad.persample.engine.call import Call
from vgrad.persample.engine.strategies import saved_bytes
from vgrad.torch_private import modes


def at_a_time(call: Call) -> int | None:
    """Return how many samples a chunk has by `chunk_size`; None for all.

    With "auto" a chunk fits into half of the free memory of the device.
    """
    if call.strategy == "loop":
        return 1
    if call.chunk_size != "auto":
        return call.chunk_size
    if call.captured:  # a capture has split the batch
        return None
    if modes.inside_transform():
        raise ValueError(
            f'{call.function}(chunk_size="auto"): expected a number inside a '
            f"transform of torch.func, where memory cannot be measured."
        )
    # A sample takes its activations twice (values and their gradients) and three times
    # its gradient (as computed, and two passes of arithmetic).
    gradient = sum(value.nbytes for value in call.params.values())
    per_sample = max(1, 3 * gradient + 2 * saved_bytes(call))
    return max(1, devices.free_bytes(call.device) // 2 // per_sample)
