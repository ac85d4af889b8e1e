"""Rows of data sets, the order in which they come, and states that are kept."""

import numpy as np
import pytest
import zarr

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler  # noqa: E402

from goblin_dask.errors import InputError  # noqa: E402
from goblin_dask.training import checkpoint  # noqa: E402
from goblin_dask.training.data import Position, Rows, parts  # noqa: E402

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10)


def stored(array, path):
    return zarr.create_array(str(path), data=array.numpy(), chunks=(3, *array.shape[1:]))


@pytest.mark.parametrize("kind", ["tensors", "arrays", "zarr", "data set", "loader"])
def test_rows(kind, tmp_path):
    data = {
        "tensors": lambda: (X, Y),
        "arrays": lambda: (X.numpy(), Y.numpy()),
        "zarr": lambda: (stored(X, tmp_path / "x"), stored(Y, tmp_path / "y")),
        "data set": lambda: TensorDataset(X, Y),
        "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
    }[kind]()
    rows = Rows(data)
    (x,), y = rows([7, 2, 2, 9])
    assert torch.equal(x, X[[7, 2, 2, 9]])
    assert torch.equal(y, Y[[7, 2, 2, 9]])
    assert len(rows) == 10
    assert (rows.batch, rows.shuffle) == ((4, True) if kind == "loader" else (None, False))


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (Endless(), "IterableDataset"),
        (DataLoader(TensorDataset(X, Y), sampler=WeightedRandomSampler([1.0] * 10, 10)), "sampler of its own"),
        ((X, Y[:3]), "10 rows, targets 3"),
        (3, "a torch Dataset"),
        ((X[:0], Y[:0]), "no rows"),
    ],
)
def test_rows_refused(data, match):
    with pytest.raises(InputError, match=match):
        Rows(data)


def test_the_order_follows_from_seed_and_position():
    position, seen = Position(), []
    for _ in range(6):
        numbers = position.rows(10, 4, True, 5)
        position.advance(len(numbers), 10)
        seen.append(numbers)
    assert list(map(len, seen)) == [4, 4, 2, 4, 4, 2]
    for epoch in (seen[:3], seen[3:]):
        assert sorted(np.concatenate(epoch)) == list(range(10))
    assert not np.array_equal(seen[0], seen[3])
    assert np.array_equal(Position(1, 4).rows(10, 4, True, 5), seen[4])
    assert list(map(len, parts(np.arange(10), 4))) == [4, 4, 2]


STATE = {
    "numbers": {0: 0.1, 1: (1, None, True)},
    "texts": ["a", float("inf")],
    "tensors": {"a": torch.arange(3, dtype=torch.bfloat16), "b": torch.tensor(2.5, dtype=torch.float64)},
}


def test_states_are_kept_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.zarr"
    checkpoint.save(path, STATE)
    found = checkpoint.load(path)
    assert found["numbers"] == STATE["numbers"]
    assert found["texts"] == STATE["texts"]
    for name, tensor in STATE["tensors"].items():
        assert found["tensors"][name].dtype == tensor.dtype
        assert torch.equal(found["tensors"][name], tensor)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(zarr.Group, "create_array", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(path, {"other": torch.ones(2)})
    assert checkpoint.load(path)["numbers"] == STATE["numbers"]
    checkpoint.save(path, {"other": torch.ones(2)})
    assert torch.equal(checkpoint.load(path)["other"], torch.ones(2))
    assert len(list(zarr.open_group(str(path)).group_keys())) == 1
    with pytest.raises(InputError, match="cannot be kept"):
        checkpoint.save(path, {"function": print})
