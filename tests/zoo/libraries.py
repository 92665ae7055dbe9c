"""Libraries that tests take where they are installed, imported when they are needed."""

import importlib
import importlib.util
import os
import warnings
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

_DECLARED = []


def installed(name: str) -> bool:
    return not name or importlib.util.find_spec(name) is not None


def declare_vision_ops() -> None:
    """Let torchvision's wheel for CUDA be imported beside torch for CPUs.

    Its ops do not load there, and its import describes two of them all the same.
    """
    if not torch.cuda.is_available() and not _DECLARED:
        ops = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            ops.define(f"{name}(Tensor boxes, Tensor scores, float most) -> Tensor")
        _DECLARED.append(ops)


class Library:
    """A library whose parts are imported when they are asked for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, part: str) -> Any:
        declare_vision_ops()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old forms in others' files
            return getattr(importlib.import_module(self.name), part)
