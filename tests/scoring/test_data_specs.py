"""Data that need no code: arrays, folders of images, Parquet, data sets of Hugging Face."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import pyflatness as pf
from pyflatness.messages import shown
from pyflatness.scoring import data_specs, specs
from pyflatness.scoring.worker import Maker
from support.score_runs import arguments_of, rows_of, saved, status


def read(path: Path, **arguments: object):
    """As the command line does it, from JSON."""
    arguments = json.loads(json.dumps(arguments))
    return Maker(str(path), arguments, "--data").made()


def refusal(path: Path, **arguments: object) -> str:
    with pytest.raises(pf.errors.InputError) as caught:
        list(read(path, **arguments))
    return str(caught.value)


def same(found: Tensor, array: object) -> bool:
    return torch.equal(found, torch.as_tensor(array)) and found.dtype == torch.as_tensor(array).dtype


def test_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 4)), np.arange(10, dtype=np.uint8)
    np.savez_compressed(path := tmp_path / "d.npz", x=x, y=y, other=rng.normal(size=3), big=x.astype(">f4"))
    inputs, targets = read(path)
    assert same(inputs, x.astype("f4"))
    assert same(targets, y.astype("i8"))
    inputs, targets = read(path, inputs="big", targets="x", count=3, dtype="float64")
    assert same(inputs, x[:3].astype("f4").astype("f8"))
    assert same(targets, x[:3])
    assert "there is no 'z'; there are 'x', 'y', 'other', 'big'" in refusal(path, inputs="z")
    assert "10 samples in 'x' and 3 in 'other'" in refusal(path, targets="other")
    assert "dtype: float32 or another" in refusal(path, dtype="int8")


def test_whole_numbers_are_inputs_of_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    images = np.arange(60, dtype=np.uint8).reshape(5, 3, 2, 2)
    np.savez(path := tmp_path / "d.npz", images=images, y=np.arange(5), rows=images[:, 0, 0])
    inputs, targets = read(path, dtype="float32")
    assert same(inputs, images.astype("f4"))
    assert same(targets, np.arange(5))
    assert same(read(path, inputs="rows")[0], images[:, 0, 0].astype("i8"))  # may be indices
    assert "uint8 of shape (5, 3, 2, 2); --data-args dtype=float32 makes" in refusal(path)


def test_arrays_that_cannot_be_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz", a=np.zeros(3), b=np.zeros(3))
    assert """inputs: say which it is, as --data-args '{"inputs": "NAME"}'; there are 'a', 'b'""" in refusal(
        tmp_path / "none.npz"
    )
    np.savez(tmp_path / "objects.npz", x=np.array([print, None], dtype=object), y=np.zeros(2))
    assert "allow_pickle=False" in refusal(tmp_path / "objects.npz")
    np.savez(tmp_path / "texts.npz", x=np.array(["a", "b"]), y=np.zeros(2))
    assert "an array of numbers is wanted, got <U1 of shape (2,)" in refusal(tmp_path / "texts.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "none.npz").read_bytes()[:200])
    assert "no file of arrays, or a damaged one" in refusal(tmp_path / "cut.npz")
    with pytest.raises(pf.errors.InputError, match="there is no such file"):
        data_specs.resolve(str(tmp_path / "missing.npz"))


def test_tensors_that_torch_saved(tmp_path: Path) -> None:
    x, y = torch.randn(5, 3), torch.arange(5)
    for number, held in enumerate([(x, y), [x, y], {"images": x, "labels": y}]):
        torch.save(held, tmp_path / f"{number}.pt")
        found = data_specs.resolve(str(tmp_path / f"{number}.pt"))(count=4)
        assert [part.tolist() for part in found] == [x[:4].tolist(), y[:4].tolist()]
    torch.save({"a": x, "y": y}, tmp_path / "named.pth")
    assert torch.equal(data_specs.resolve(str(tmp_path / "named.pth"))(inputs="a")[0], x)
    torch.save(TensorDataset(x, y), tmp_path / "set.pt")  # whose class would be imported
    assert "not only tensors and plain containers but torch.utils.data" in refusal(tmp_path / "set.pt")
    for wrong in (x, (x, y, y), {"x": x, "y": 3}):
        torch.save(wrong, tmp_path / "wrong.pt")
        assert "a pair of tensors, or a dict of tensors by name, is wanted; got " in refusal(tmp_path / "wrong.pt")


def test_a_callable_is_still_one(tiny: str) -> None:
    assert data_specs.resolve(f"{tiny}:data") is specs.resolve(f"{tiny}:data")
    with pytest.raises(pf.errors.InputError, match=r"file\.py:callable or package\.module:callable"):
        data_specs.resolve("no_such_folder")


def test_scores_on_arrays_are_those_on_the_same_tensors(tiny: str) -> None:
    (inputs, targets) = (torch.cat(parts) for parts in zip(*specs.resolve(f"{tiny}:data")(), strict=True))
    np.savez(path := Path(tiny).with_name("d.npz"), images=inputs.numpy(), labels=targets.numpy())
    assert status(*arguments_of(tiny, saved(tiny, 1, "a.safetensors"))) == 0
    (expected,) = rows_of(tiny)
    assert status(*arguments_of(tiny, Path(tiny).with_name("a.safetensors"), "--data", path)) == 0
    (found,) = rows_of(tiny)
    assert float(found["value"]) == pytest.approx(float(expected["value"]), rel=1e-5)
    assert found["samples"] == expected["samples"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    Image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name in ("cat/b.png", "cat/a.png", "ant/deep/c.png", "10/d.png", "cat/.hidden.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).save(tmp_path / "images" / name)
    (tmp_path / "images" / "cat" / "notes.txt").touch()
    return tmp_path / "images"


def test_folders_of_images(images: Path) -> None:
    from PIL import Image

    (inputs, targets), last = read(images, batch_size=3)
    assert targets.tolist() == [0, 1, 2]  # "10" before "ant" before "cat"
    assert last[1].tolist() == [2]
    for values, name in zip(torch.cat([inputs, last[0]]), ("10/d", "ant/deep/c", "cat/a", "cat/b"), strict=True):
        assert same(
            values, np.asarray(Image.open(images / f"{name}.png"), dtype="f4").transpose(2, 0, 1) / np.float32(255)
        )
    (grey, _), *_ = read(images, channels=1)
    assert grey.shape == (4, 1, 6, 8)
    (scaled, _), *_ = read(images, mean=[0.5, 0.4, 0.3], std=[0.1, 0.2, 0.4], batch_size=3)
    assert torch.allclose(scaled[:, 2], (inputs[:, 2] - 0.3) / 0.4)
    (resized, _), *_ = read(images, size=[3, 5])
    assert resized.shape == (4, 3, 3, 5)
    (square, _), *_ = read(images, size=4)
    assert square.shape == (4, 3, 4, 4)
    assert 0 <= square.min() < square.max() <= 1
    assert (square.mean() - inputs.mean()).abs() < 0.1


def test_folders_of_images_that_cannot_be_read(images: Path) -> None:
    from PIL import Image

    for arguments, words in (
        ({"size": [1, 2, 3]}, "size: a number or [height, width] is wanted, got [1, 2, 3]"),
        ({"size": 0}, "size: a number"),
        ({"channels": 2}, "channels: 1 or 3"),
        ({"mean": [0.5]}, "mean: 3 numbers are wanted"),
        ({"std": [1, 0, 1]}, "std: numbers other than 0"),
    ):
        assert words in refusal(images, **arguments), shown(arguments)
    Image.new("RGB", (3, 3)).save(images / "cat" / "c.png")
    assert "c.png: images of several sizes, 6 × 8 and 3 × 3; pass size=" in refusal(images)
    (images / "cat" / "a.png").write_bytes((images / "cat" / "b.png").read_bytes()[:100])
    assert "a.png: no image, or a damaged one" in refusal(images)
    (images / "empty").mkdir()
    assert "no images; a folder for each class is wanted" in refusal(images / "empty")


def test_tables_of_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"a": [1.0, 2.0, 3.0], "b": [4, 5, 6], "label": [0, 1, 0], "pixels": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]}
    parquet.write_table(pa.table(columns), path := tmp_path / "d.parquet")
    inputs, targets = read(path, inputs=["a", "b"])
    assert same(inputs, np.array([[1, 4], [2, 5], [3, 6]], dtype="f4"))
    assert same(targets, np.array([0, 1, 0]))
    inputs, targets = read(path, inputs="pixels", targets="a", count=2)
    assert same(inputs, np.array([[1, 2], [3, 4]], dtype="f4"))
    assert same(targets, np.array([1, 2], dtype="f4"))
    assert "there is no 'c'; there are 'a', 'b', 'pixels'" in refusal(path, inputs=["c"])
    parquet.write_table(pa.table({"x": [[1.0], [1.0, 2.0]], "y": [0, 1]}), path)
    assert "x: lists of several lengths" in refusal(path)
    path.write_bytes(path.read_bytes()[:-10])
    assert "no Parquet file, or a damaged one" in refusal(path)


@pytest.mark.filterwarnings("ignore")  # of the library's own dependencies
def test_data_sets_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (3, 6, 8, 3), dtype=np.uint8)
    rows = datasets.Dataset.from_dict({"image": [Image.fromarray(each) for each in pixels], "label": [2, 0, 1]})
    rows.save_to_disk(tmp_path / "images")
    (inputs, targets), _ = read(tmp_path / "images", batch_size=2)
    assert same(inputs, pixels[:2].transpose(0, 3, 1, 2).astype("f4") / np.float32(255))
    assert targets.tolist() == [2, 0]
    numbers = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]})
    datasets.DatasetDict({"train": numbers, "test": numbers}).save_to_disk(tmp_path / "numbers")
    inputs, targets = read(tmp_path / "numbers", split="test", count=1)
    assert same(inputs, np.array([[1, 2]], dtype="f4"))
    assert same(targets, np.array([0]))
    assert "split: say which it is" in refusal(tmp_path / "numbers")
    tokens = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3, 4]], "text": ["a", "b"]})
    tokens.save_to_disk(tmp_path / "tokens")
    (batch,) = read(tmp_path / "tokens")
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == [[1, 2], [3, 4]]
    (tmp_path / "numbers" / "dataset_dict.json").write_text("[")
    assert "no data set of Hugging Face, or a damaged one" in refusal(tmp_path / "numbers")


def test_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(pf.errors.MissingExtraError, match=r"Pillow: pip install 'pyflatness\[data\]'"):
        data_specs.resolve(str(tmp_path))
