"""The file of golden numbers: `python -m tests.golden.recorded` writes it.

`values.safetensors` has the numbers in float32, for machines that round in other
places; `bits.json` has a hash of the bits of each result and the machine that wrote it.
"""

import hashlib
import json
import platform
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from tests.golden import calls

FOLDER = Path(__file__).parent
BITS, VALUES = FOLDER / "bits.json", FOLDER / "values.safetensors"


def fingerprint():
    """Return the facts of a machine on which bits depend."""
    processor = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": (processor or [platform.processor()])[0],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def numbers(tree):
    """Return the tensors of a result by their place in it, and None for the rest."""
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def hashed(result):
    """Return a hash of the names, shapes, dtypes and bits of a result."""
    state = hashlib.sha256()
    for name, tensor in numbers(result).items():
        tensor = tensor.detach().contiguous()
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def compact(result):
    """Return the numbers of a result in float32, for the file."""
    return {
        name: tensor.detach().to(torch.float32, copy=True).contiguous()
        for name, tensor in numbers(result).items()
    }


def differences(result, case, values, tolerance):
    """Return the places where a result is not that of the file, in words."""
    found = compact(result)
    expected = {
        name.removeprefix(f"{case}|"): tensor
        for name, tensor in values.items()
        if name.startswith(f"{case}|")
    }
    if found.keys() != expected.keys():
        return [f"names {sorted(found)}, recorded {sorted(expected)}"]
    wrong = []
    for name, tensor in expected.items():
        scale = max(1e-30, tensor.nan_to_num().abs().max().item())
        error = (found[name] - tensor).nan_to_num().abs().max().item() / scale
        if error > tolerance or not torch.equal(found[name].isnan(), tensor.isnan()):
            wrong.append(f"{name}: off by {error:.2g} of the largest")
    return wrong


def write():
    """Write both files, by one thread."""
    torch.set_num_threads(1)
    bits, values = {}, {}
    results = {name: run() for name, run in calls.CASES.items()}
    for case, result in (results | calls.on_two_ranks()).items():
        bits[case] = hashed(result)
        values |= {f"{case}|{name}": each for name, each in compact(result).items()}
    save_file(values, VALUES)
    facts = {"machine": fingerprint(), "bits": bits}
    BITS.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    write()
