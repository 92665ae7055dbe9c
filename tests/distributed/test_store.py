"""Any number of ranks writes the bytes of one, and stops as one where a rank fails."""

import pytest

from tests.attribution.test_store import (
    BUFFERS,
    LOSS,
    PARAMS,
    N,
    X,
    Y,
    content,
    cut,
    write,
)
from vgrad.attribution import Store
from vgrad.distributed import RankError


def on_rank(mesh, folder, calls):
    for options in calls:
        store = write(folder, mesh=mesh, **options)
    store.check(LOSS, PARAMS, BUFFERS)
    return len(store)


def fails(mesh, folder, kind):
    """Write what differs on the last rank."""
    last = mesh.get_local_rank() == mesh.size() - 1
    batches = cut(0, N)
    if kind == "data" and last:
        batches[1:3] = batches[2:0:-1]
    if kind == "size" and last:
        batches = batches[:2]
    options = {"samples_per_file": 7} if kind == "options" and last else {}
    if kind == "error" and last:
        batches[3] = (X[:7, :1], Y[:7])
    try:
        write(folder, batches, mesh=mesh, **options)
    except RankError as error:
        return str(error)
    except RuntimeError:
        return "its own error"


def test_any_number_of_ranks_writes_the_same_bytes(some, tmp_path):
    calls = [{"batches": cut(0, N)}, {"batches": cut(N, N + 20), "first": N}]
    for options in calls:
        write(tmp_path / "one", **options)
    assert some.on_mesh(on_rank, tmp_path / "several", calls) == [N + 20] * some.size
    assert content(tmp_path / "several") == content(tmp_path / "one")
    # What one process began is completed by several.
    (tmp_path / "one" / "00000001.safetensors").unlink()
    some.on_mesh(on_rank, tmp_path / "one", [{"batches": cut(0, N + 20)}])
    assert content(tmp_path / "several") == content(tmp_path / "one")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("data", "expected the same data on all ranks"),
        ("size", "expected the same count on all ranks"),
        ("options", "expected the same index on all ranks"),
        ("error", "rank 1 stopped with"),
    ],
)
def test_ranks_that_differ_leave_no_complete_store(kind, text, ranks, tmp_path):
    found = ranks(2).on_mesh(fails, tmp_path / "store", kind)
    assert text in found[0]
    assert text in found[1] or kind == "error"
    with pytest.raises((FileNotFoundError, ValueError)):
        len(Store(tmp_path / "store"))
    write(tmp_path / "store")
    write(tmp_path / "one")
    assert content(tmp_path / "store") == content(tmp_path / "one")
