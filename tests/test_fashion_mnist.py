import gzip
import hashlib
import importlib.util
import re
import struct
from functools import partial
from pathlib import Path

import pytest
import torch

from evener.textbook import fashion_mnist
from evener.textbook.download import DownloadError, RemoteFile
from evener.textbook.fashion_mnist import DataError, find_full, load, read_idx

WAYS = re.compile(r"--data FOLDER.*apt install dataset-fashion-mnist.*downloaded", re.DOTALL)
FILE_NAMES = [
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
]


def images_file(num, *, magic=0x803, rows=28):
    return struct.pack(">4I", magic, num, rows, 28) + bytes(
        i % 251 for i in range(num * rows * 28)
    )


def labels_file(labels, *, magic=0x801):
    return struct.pack(">2I", magic, len(labels)) + bytes(labels)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in {
        "train-images-idx3-ubyte": images_file(3),
        "train-labels-idx1-ubyte": labels_file([0, 9, 4]),
        "t10k-images-idx3-ubyte": images_file(2),
        "t10k-labels-idx1-ubyte": labels_file([1, 2]),
    }.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return folder


# ------------------------------------------------------------------ the sample


def test_the_sample_is_balanced():
    data = load()
    assert data.train.images.shape == (3000, 1, 28, 28)
    assert data.test.images.shape == (1000, 1, 28, 28)
    assert data.train.images.dtype == torch.uint8
    assert data.train.labels.dtype == torch.int64
    assert data.train.labels.bincount().tolist() == [300] * 10
    assert data.test.labels.bincount().tolist() == [100] * 10
    assert (len(data.train), len(data.test)) == (3000, 1000)


def test_the_sample_is_small_and_carries_its_licence():
    folder = fashion_mnist.SAMPLE_FOLDER
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000
    licence = (folder / "LICENSE").read_text()
    assert "Copyright (c) 2017 Zalando SE" in licence
    assert "Permission is hereby granted, free of charge" in licence


@pytest.mark.skipif(
    not fashion_mnist.DEBIAN_FOLDER.is_dir(), reason="needs the package dataset-fashion-mnist"
)
def test_the_sample_can_be_made_again_from_the_full_data(tmp_path):
    path = Path(__file__).parent.parent / "scripts" / "make_sample.py"
    spec = importlib.util.spec_from_file_location("make_sample", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.make(fashion_mnist.DEBIAN_FOLDER, tmp_path, "train", 300)
    script.make(fashion_mnist.DEBIAN_FOLDER, tmp_path, "t10k", 100)
    again, sample = load(tmp_path), load("sample")
    assert torch.equal(again.train.images, sample.train.images)
    assert torch.equal(again.train.labels, sample.train.labels)
    assert torch.equal(again.test.images, sample.test.images)
    assert torch.equal(again.test.labels, sample.test.labels)


@pytest.mark.skipif(
    not fashion_mnist.DEBIAN_FOLDER.is_dir(), reason="needs the package dataset-fashion-mnist"
)
def test_the_full_data():
    data = load("full")
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert data.train.labels.bincount().tolist() == [6000] * 10
    pixels = data.train.images.float() / 255
    assert pixels.mean().item() == pytest.approx(0.2860, abs=1e-4)
    assert pixels.std().item() == pytest.approx(0.3530, abs=1e-4)


# ------------------------------------------------------------------ a folder


def test_a_folder_with_compressed_or_plain_files(folder):
    plain = folder / "t10k-images-idx3-ubyte"
    plain.write_bytes(gzip.decompress((folder / f"{plain.name}.gz").read_bytes()))
    (folder / f"{plain.name}.gz").unlink()
    data = load(str(folder))
    assert data.source == str(folder)
    assert data.train.labels.tolist() == [0, 9, 4]
    assert data.test.labels.tolist() == [1, 2]
    assert data.test.images[1].flatten().tolist() == [i % 251 for i in range(784, 2 * 784)]


@pytest.mark.parametrize("name", FILE_NAMES)
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(DataError, match=name) as caught:
        load(folder)
    assert WAYS.search(str(caught.value))


@pytest.mark.parametrize("name", FILE_NAMES)
def test_a_truncated_gzip_file_is_named(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-10])
    with pytest.raises(DataError, match=f"{name}.*cannot be read") as caught:
        load(folder)
    assert WAYS.search(str(caught.value))


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c[:20] + b"\xff\xff\xff\xff" + c[24:],  # nonsense in the compressed bytes
        lambda c: c[:-8] + b"\0\0\0\0" + c[-4:],  # a wrong checksum
        lambda c: c + b"more",
    ],
)
def test_a_damaged_gzip_file_is_named(folder, damage):
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=path.name):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing, expected 00 00 08 03"),
        (b"<html>", "begins with 3c 68 74 6d, expected 00 00 08 03"),
        (labels_file([1, 2, 3]), "begins with 00 00 08 01, expected 00 00 08 03"),
        (images_file(3)[:9], "has 9 bytes, expected a header of 16"),
        (images_file(3, rows=27), r"sizes are \[3, 27, 28\], expected"),
        (images_file(0), r"sizes are \[0, 28, 28\], expected \['1 or more', 28, 28\]"),
        (images_file(3)[:-1], "holds 2367 bytes, expected 2368"),
        (images_file(3) + b"\0", "holds 2369 bytes, expected 2368"),
    ],
)
def test_a_wrong_file_is_named_with_what_was_expected(folder, content, message):
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path.name}.*{message}"):
        load(folder)


def test_as_many_labels_as_images(folder):
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(labels_file([1, 2, 3]))
    with pytest.raises(DataError, match=r"t10k-labels.* has 3 labels, expected 2.*t10k-images"):
        load(folder)


def test_labels_beyond_nine(folder):
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(labels_file([1, 10]))
    with pytest.raises(DataError, match=r"t10k-labels.* has the label 10, expected 0 to 9"):
        load(folder)


def test_a_folder_instead_of_a_file(folder):
    path = folder / "t10k-labels-idx1-ubyte.gz"
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=f"{path.name}.*cannot be read"):
        load(folder)


def test_what_is_neither_a_word_nor_a_folder(tmp_path):
    with pytest.raises(DataError, match='not "sample", "full" or a folder') as caught:
        load(tmp_path / "nowhere")
    assert WAYS.search(str(caught.value))


def test_read_idx_gives_memory_that_may_be_written(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(labels_file([5, 6]))
    labels = read_idx(path, ())
    labels[0] = 7
    assert labels.tolist() == [7, 6]


def test_limited_takes_the_first(folder):
    data = load(folder).limited(2)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 9], [1, 2])
    assert len(data.limited(100).train) == 2
    with pytest.raises(DataError, match="limit=0: expected at least 1"):
        data.limited(0)


# ------------------------------------------------------------------ the full data


def test_the_debian_folder_comes_first(folder, tmp_path):
    assert find_full(debian_folder=folder, cache_folder=tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def remote_files(folder):
    return tuple(
        RemoteFile(p.name, p.stat().st_size, hashlib.sha256(p.read_bytes()).hexdigest())
        for p in sorted(folder.iterdir())
    )


def test_a_download_goes_into_the_cache_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told = []
    find = partial(
        find_full, debian_folder=tmp_path / "no", url=folder.as_uri(), files=remote_files(folder)
    )
    monkeypatch.setattr(fashion_mnist, "find_full", find)
    data = load("full", on_bytes=lambda name, *_: told.append(name))
    assert data.source == str(tmp_path / "cache" / "evener" / "fashion-mnist")
    assert data.train.labels.tolist() == [0, 9, 4]
    assert sorted(told) == FILE_NAMES
    # A second time from the cache: the server is not asked.
    assert find(url=(tmp_path / "gone").as_uri()) == Path(data.source)


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_the_cache_folder_in_the_home_folder(folder, tmp_path, monkeypatch, value):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = find_full(
        debian_folder=tmp_path / "no", url=folder.as_uri(), files=remote_files(folder)
    )
    assert found == tmp_path / ".cache" / "evener" / "fashion-mnist"


def test_a_failed_download_names_all_ways(tmp_path):
    with pytest.raises(DataError, match=r"cannot download .*/gone/train-images") as caught:
        find_full(
            debian_folder=tmp_path / "no",
            cache_folder=tmp_path / "cache",
            url=(tmp_path / "gone").as_uri(),
        )
    assert WAYS.search(str(caught.value))
    assert isinstance(caught.value.__cause__, DownloadError)
    assert list((tmp_path / "cache").iterdir()) == []
