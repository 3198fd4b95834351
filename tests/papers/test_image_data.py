"""Readers of image data sets: what torchvision and Hugging Face leave on disk, ``.npz``, and files that are hostile."""

import gzip
import io
import os
import pickle
import struct

import numpy as np
import pytest
import torch

import pyflatness as pf
from benchmarks.papers import image_data

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (7, 3, 32, 32), dtype=np.uint8)
LABELS = [3, 1, 4, 1, 5, 9, 2]


def same(found, images, labels):
    assert (found[0].dtype, found[1].dtype) == (torch.uint8, torch.int64)
    assert np.array_equal(found[0].numpy(), images)
    assert found[1].tolist() == [*labels]


def protocol_2(content):
    """Bytes as Python 2 wrote them: texts are bytes there, and arrays name ``numpy.core``."""
    text = pickle.dumps(content, protocol=2)
    return text.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def batch(key, pixels, labels):
    return {b"batch_label": b"a batch", key: labels, b"data": pixels.reshape(len(pixels), -1), b"filenames": [b"a.png"]}


@pytest.mark.parametrize("write", [protocol_2, pickle.dumps])
def test_cifar10_of_torchvision(tmp_path, write):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number in range(1, 6):
        own = slice(number - 1, number)
        (folder / f"data_batch_{number}").write_bytes(write(batch(b"labels", PIXELS[own], LABELS[own])))
    (folder / "test_batch").write_bytes(write(batch(b"labels", PIXELS[5:], LABELS[5:])))
    train, test = image_data.read(tmp_path, "cifar10")
    same(train, PIXELS[:5], LABELS[:5])
    same(test, PIXELS[5:], LABELS[5:])


def test_cifar100_of_torchvision(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test"):
        content = batch(b"fine_labels", np.asfortranarray(PIXELS.reshape(7, -1)), LABELS) | {b"coarse_labels": [0] * 7}
        (folder / name).write_bytes(protocol_2(content))
    same(image_data.read(tmp_path, "cifar100")[0], PIXELS, LABELS)


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "content",
    [
        {b"data": Evil(os.system, "touch harmed"), b"labels": LABELS},
        {b"data": PIXELS.reshape(7, -1), b"labels": Evil(eval, "open('harmed', 'w')")},
        {b"data": np.array([Evil(os.system, "touch harmed")], dtype=object), b"labels": LABELS},
        {b"data": PIXELS.reshape(7, -1).astype(np.float32), b"labels": LABELS},
        {b"data": PIXELS.reshape(7, -1)[:, :100], b"labels": LABELS},
        {b"data": PIXELS.reshape(7, -1), b"labels": ["a"] * 7},
        {b"data": [1, 2], b"labels": LABELS},
        [1, 2],
    ],
)
def test_pickles_are_data(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar-100-python").mkdir()
    content = {**content, b"fine_labels": content[b"labels"]} if isinstance(content, dict) else content
    for name in ("train", "test"):
        (tmp_path / "cifar-100-python" / name).write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(pf.errors.InputError, match="cifar-100-python/train"):
        image_data.read(tmp_path, "cifar100")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("cut", [0, 1, 50, 3000])
def test_damaged_pickles(tmp_path, cut):
    (tmp_path / "cifar-100-python").mkdir()
    content = protocol_2(batch(b"fine_labels", PIXELS, LABELS))[:cut]
    (tmp_path / "cifar-100-python" / "train").write_bytes(content)
    with pytest.raises(pf.errors.InputError, match="no batch of images, or a damaged one"):
        image_data.read(tmp_path, "cifar100")


@pytest.mark.parametrize(("name", "place"), [("mnist", "MNIST/raw"), ("fashion_mnist", "FashionMNIST/raw")])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist_of_torchvision(tmp_path, name, place, packed):
    grey = PIXELS[:, 0, :28, :28]
    (tmp_path / place).mkdir(parents=True)
    for stem in ("train", "t10k"):
        for kind, shape, values in (("images-idx3", grey.shape, grey), ("labels-idx1", (7,), np.uint8(LABELS))):
            content = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values.tobytes()
            path = tmp_path / place / f"{stem}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
    same(image_data.read(tmp_path, name)[1], grey[:, None], LABELS)
    path.write_bytes(path.read_bytes()[:20] if packed else path.read_bytes()[:-1])
    with pytest.raises(pf.errors.InputError, match="t10k-labels-idx1-ubyte"):
        image_data.read(tmp_path, name)


def png(pixels):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(("image", "label"), [("image", "label"), ("img", "fine_label")])
def test_hugging_face(tmp_path, image, label):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"bytes": png(pixels.transpose(1, 2, 0)), "path": None} for pixels in PIXELS]
    table = arrow.table({image: rows, label: LABELS})
    (tmp_path / "a" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        parquet.write_table(table, tmp_path / "a" / "data" / f"{split}-00000-of-00001.parquet")
        (tmp_path / "b" / split).mkdir(parents=True)
        with (
            (tmp_path / "b" / split / "data-00000-of-00001.arrow").open("wb") as file,
            arrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
    for name in ("a", "b"):
        same(image_data.read(tmp_path, name)[0], PIXELS, LABELS)
    parquet.write_table(arrow.table({image: [1]}), tmp_path / "a" / "data" / "train-00000-of-00001.parquet")
    with pytest.raises(pf.errors.InputError, match="columns 'image' and 'label' are wanted"):
        image_data.read(tmp_path, "a")


def test_npz(tmp_path):
    grey, files = PIXELS[:, 0], [png(pixels[0]) for pixels in PIXELS]
    offsets = np.cumsum([0, *map(len, files)])
    arrays, encoded = {}, {}
    for split in ("train", "test"):
        arrays |= {f"{split}_images": grey, f"{split}_labels": np.uint8(LABELS)}
        encoded |= {f"{split}_png": np.frombuffer(b"".join(files), np.uint8), f"{split}_offsets": offsets}
        encoded |= {f"{split}_labels": np.uint8(LABELS), "class_names": np.array(["a"])}
    np.savez(tmp_path / "plain.npz", **arrays)
    np.savez(tmp_path / "encoded.npz", **encoded)
    for name in ("plain", "encoded"):
        for found in image_data.read(tmp_path, name):
            same(found, grey[:, None], LABELS)
    scaled, labels = image_data.scaled(image_data.read(tmp_path, "plain")[0], 2)
    assert (scaled.shape, labels.tolist()) == ((2, 1, 32, 32), LABELS[:2])
    assert float(scaled[0, 0, 0, 0]) == pytest.approx(grey[0, 0, 0] / 127.5 - 1)


def test_what_is_not_there(tmp_path):
    with pytest.raises(pf.errors.InputError, match="cifar-10-batches-py/ of torchvision, cifar10/ of Hugging Face"):
        image_data.read(tmp_path, "cifar10")
    with pytest.raises(pf.errors.InputError, match="--data-dir"):
        image_data.read(None, "mnist")
    np.savez(tmp_path / "objects.npz", train_images=np.array([{}], dtype=object), train_labels=[1])
    with pytest.raises(pf.errors.InputError, match=r"objects\.npz: no file of arrays"):
        image_data.read(tmp_path, "objects")
