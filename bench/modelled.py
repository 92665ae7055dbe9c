"""How long a GPU would take for the ops of a call, by their FLOPs and bytes.

An op is one kernel, which takes the longer of its FLOPs over the rate of its dtype and
its bytes over the bandwidth; the kernels of a call follow each other. Launches cost
nothing here, so a call of small kernels takes longer than it is modelled.
"""

import math
from collections import Counter
from collections.abc import Iterable

from tests.accelerator.device import Event, Operand

GPUS = {
    "A100": {"half": 312e12, "tf32": 156e12, "float32": 19.5e12, "float64": 19.5e12},
    "H100": {"half": 990e12, "tf32": 495e12, "float32": 67e12, "float64": 67e12},
    "H200": {"half": 990e12, "tf32": 495e12, "float32": 67e12, "float64": 67e12},
}
"""FLOPs a second of dense products, by the data sheets of the SXM boards; float64 on
tensor cores."""

BYTES = {"A100": 2.0e12, "H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second to and from memory."""

SHARE = 0.7
"""The share of both that kernels are assumed to reach."""

LEFT = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "addmm": 1, "baddbmm": 1}
LEFT |= {"addmv": 1, "addbmm": 1}
"""Products, and the place of the left factor among their operands."""

GATHERS = {"embedding", "index_select", "index", "gather", "take", "index_add"}
"""Ops that read, or add to, some rows of their first operand."""


def flops(event: Event) -> int:
    """Return the FLOPs of a product or a convolution, 0 of another op."""
    op = event.op.rstrip("_")
    if op in LEFT:
        factor = event.inputs[LEFT[op]]
        return 2 * _numel(event.outputs[0]) * factor.shape[-1]
    if op == "convolution":
        x, weight = event.inputs[:2]
        (out,) = event.outputs
        transposed = out.shape[1] != weight.shape[0]
        positions = _numel(x if transposed else out)
        return 2 * positions * math.prod(weight.shape[1:])
    if op == "convolution_backward":
        outputs, _, weight = event.inputs
        gradients = sum(len(output.shape) > 1 for output in event.outputs)
        return gradients * 2 * _numel(outputs) * math.prod(weight.shape[1:])
    return 0


def rate(event: Event, tf32: bool) -> str:
    """Return the rate at which a product runs; cuDNN may round float32 anyway."""
    place = LEFT.get(event.op.rstrip("_"), 0)
    dtypes = {value.dtype for value in event.inputs[place : place + 2]}
    if dtypes <= {"Half", "BFloat16"}:
        return "half"
    if "Double" in dtypes or "ComplexFloat" in dtypes:
        return "float64"
    return "tf32" if tf32 or event.op.startswith("convolution") else "float32"


def moved(event: Event) -> int:
    """Return the bytes that an op reads and writes."""
    written = sum(output.bytes for output in event.outputs)
    op = event.op.rstrip("_")
    if op in ("fill", "zero"):
        return written
    if op in GATHERS:
        others = sum(source.bytes for source in event.inputs[1:])
        if op == "index_add":  # some rows are read, added to and written
            return others + 2 * max(source.bytes for source in event.inputs[1:])
        return others + 2 * written
    return written + sum(source.bytes for source in event.inputs)


def modelled(events: Iterable[Event], tf32: bool) -> dict[str, object]:
    """Return the FLOPs by rate, the bytes, and the seconds on each GPU."""
    counted: Counter[str] = Counter()
    seconds = dict.fromkeys(GPUS, 0.0)
    total = 0
    for event in events:
        operations, size = flops(event), moved(event)
        kind = rate(event, tf32) if operations else "float32"
        if operations:
            counted[kind] += operations
        total += size
        for gpu, rates in GPUS.items():
            bound = max(operations / rates[kind], size / BYTES[gpu])
            seconds[gpu] += bound / SHARE
    return {"flops": dict(counted), "bytes": total, "seconds": seconds}


def _numel(operand: Operand) -> int:
    return math.prod(operand.shape)
