"""The comparison of curvature and attribution, by vgrad and plain torch alone."""

import json

import pytest
import torch

from bench import attribution
from bench.attribution import RESULTS, ROWS, SMALL

pytestmark = pytest.mark.more
TORCH = ("vgrad", "vmap(jacrev)", "vmap(grad)", "torch.func")


@pytest.mark.parametrize("net", SMALL)
@pytest.mark.parametrize("key", ROWS)
def test_a_contender_is_right(key, net):
    if (key, net) == ("hessian", "transformer"):
        pytest.skip("a dense Hessian takes seconds")
    row = ROWS[key]
    for name in row.contenders:
        if name in TORCH:
            assert attribution.refusal(row, name, SMALL[net]) is None


def test_wrong_numbers_and_errors_are_reasons():
    size = SMALL["perceptron"]
    ways = {
        "twice": lambda p: lambda: 2 * attribution.dense_ggn(p).diagonal(),
        "single": lambda p: lambda: single(p),
        "broken": lambda p: lambda: torch.ones(2) @ torch.ones(3),
        "absent": lambda p: __import__("no_such_package"),
    }

    def single(p):
        if p.train[0].dtype == torch.float64:
            raise TypeError("float32 is expected")
        return attribution.dense_ggn(p).diagonal()

    row = ROWS["diagonal"]._replace(contenders=ways)
    assert attribution.refusal(row, "twice", size) == "wrong, by 1"
    assert attribution.refusal(row, "single", size) is None
    reason = attribution.refusal(row, "broken", size)
    assert str(reason).startswith("raises RuntimeError: ")
    with pytest.raises(ModuleNotFoundError):
        attribution.refusal(row, "absent", size)


def test_the_table_is_of_the_results():
    whole = json.loads(RESULTS.read_text())
    assert RESULTS.with_suffix(".md").read_text() == attribution.markdown(whole)
    assert {row["commit"] for row in whole["rows"].values()} != {""}
