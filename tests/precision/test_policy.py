"""Policies: what their text means, and what their casts touch."""

import dataclasses
from typing import NamedTuple

import pytest
import torch

from tests.oracle import assert_exact
from vgrad.precision import Policy

SPELLINGS = {
    torch.float16: ("float16", "f16"),
    torch.bfloat16: ("bfloat16", "bf16"),
    torch.float32: ("float32", "f32"),
    torch.float64: ("float64", "f64"),
}
FIELDS = ("param_dtype", "compute_dtype", "output_dtype")
F16, BF16, F32, F64 = SPELLINGS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("c=bf16", (F32, BF16, BF16)),
        ("output=f16", (F32, F32, F16)),
        ("params=bf16", (BF16, BF16, BF16)),
        ("p=f64,o=f16", (F64, F64, F16)),
        ("\to=bfloat16 , compute = float64,params=f16", (F16, F64, BF16)),
        ("mixed_float16", (F32, F16, F32)),
        (" \tmixed_bfloat16\n", (F32, BF16, F32)),
        (" p = f32 ,\n c = f16 ", (F32, F16, F16)),
        *((f" {name} ", (x, x, x)) for x, names in SPELLINGS.items() for name in names),
    ],
)
def test_texts_and_their_policies(text, expected):
    policy = Policy(*expected)
    assert Policy.parse(text) == Policy.parse(str(policy)) == policy


ONCE = "each of params, compute and output .* once at most"
AMONG = "dtypes among float16, .*, bf16, .*or one of mixed_float16, mixed_bfloat16"
WRONG_KEYS = {
    "q=f32": "q=f32", "=f32": "=f32", "P=f32": "P=f32", "p=f32,": "", ",p=f32": "",
    "p=f32,,c=f16": "", "p=f32,f16": "f16", "p=f32,p=f16": "p=f16",
    "p=f32, p = f32 ": "p = f32", "c=f32,compute=f32": "compute=f32",
    "output=f32,c=f16,o=f32": "o=f32",
}  # fmt: skip
WRONG_DTYPES = {
    "": "", "  ": "", "half": "half", "F32": "F32", "int32": "int32", "p=int8": "int8",
    "torch.float32": "torch.float32", "mixed_float32": "mixed_float32", "p=,c=f16": "",
    "p=f32,c": "", "p=f32=f16": "f32=f16", "p=mixed_float16": "mixed_float16",
    "p=f32;c=f16": "f32;c=f16", "float32,float16": "float32,float16",
}  # fmt: skip
WRONG = [(text, ONCE, got) for text, got in WRONG_KEYS.items()]
WRONG += [(text, AMONG, got) for text, got in WRONG_DTYPES.items()]


@pytest.mark.parametrize(("text", "expected", "got"), WRONG)
def test_keys_and_dtypes_that_are_unknown_or_come_twice_are_refused(
    text, expected, got
):
    message = f"Policy.parse\\(.*\\): expected {expected}, got '{got}'"
    with pytest.raises(ValueError, match=message):
        Policy.parse(text)


@pytest.mark.parametrize("text", [None, 3, torch.float32, b"f32"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(TypeError, match="Policy.parse\\(.*\\): expected a string, got"):
        Policy.parse(text)


@pytest.mark.parametrize(
    "wrong", [torch.int64, torch.complex64, "float32", None, [F32]]
)
@pytest.mark.parametrize("name", FIELDS)
def test_dtypes_that_do_not_float_are_refused(wrong, name):
    known = "torch.float16, torch.bfloat16, torch.float32, torch.float64"
    message = f"Policy\\({name}=.*: expected one of {known}"
    with pytest.raises(ValueError, match=message):
        Policy(**{**dict.fromkeys(FIELDS, F32), name: wrong})


def test_policies_compare_and_hash_by_their_dtypes_and_are_frozen():
    a, b = Policy(F32, F16, F32), Policy.parse("mixed_float16")
    assert a == b
    assert str(a) == "params=float32,compute=float16,output=float32"
    assert len({a, b, Policy(F32, BF16, F32), Policy(F16, F32, F32)}) == 3
    assert Policy.parse(a) is a
    assert a.with_output_dtype(torch.float64) == Policy(F32, F16, F64) != a
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.compute_dtype = torch.float32


# Casts.


class Pair(NamedTuple):
    left: object
    right: object


def nested(dtype):
    return {
        "tensor": torch.tensor([1.5, -2.0], dtype=dtype),
        "list": [torch.ones((), dtype=dtype), None, 3, 0.5, True, "text"],
        "tuple": (torch.ones(0, dtype=dtype), {}),
        "pair": Pair(torch.arange(3), torch.ones(2, 2, dtype=dtype)),
        "mask": torch.tensor([True, False]),
        "complex": torch.ones(2, dtype=torch.complex64),
    }


@pytest.mark.parametrize("start", SPELLINGS)
@pytest.mark.parametrize("dtype", SPELLINGS)
@pytest.mark.parametrize("to", ["param", "compute", "output"])
def test_casts_touch_floating_tensors_alone(start, dtype, to):
    others = dict.fromkeys(FIELDS, F32 if dtype is F64 else F64)
    policy = Policy(**others | {f"{to}_dtype": dtype})
    tree = nested(start)
    result, expected = policy.cast(tree, to=to), nested(dtype)
    assert list(result) == list(expected)
    assert_exact(result, expected, 0)
    assert type(result["pair"]) is Pair
    assert result["tuple"][0].dtype == dtype
    assert [type(leaf) for leaf in result["list"][2:5]] == [int, float, bool]
    kept = [tree["pair"].left, tree["mask"], tree["complex"]]
    kept += [tree["tensor"]] if start is dtype else []
    leaves = [result["pair"].left, result["mask"], result["complex"], result["tensor"]]
    assert all(one is other for one, other in zip(kept, leaves, strict=False))
    assert tree["tensor"].dtype == start
    for empty in ({}, [], (), None, {"a": []}, 3, "text"):
        assert policy.cast(empty, to=to) == empty


def test_other_casts_are_refused():
    message = "Policy.cast\\(to='half'\\): expected one of 'compute', 'param', 'output'"
    with pytest.raises(ValueError, match=message):
        Policy(F32, F16, F32).cast(torch.ones(1), to="half")
