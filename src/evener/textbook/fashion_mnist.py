"""Fashion-MNIST: 28x28 grey pictures of ten kinds of clothes, and where to get them.

The data set is four files in the IDX format, gzip-compressed or not. All numbers in it are
big-endian::

    images   00 00 08 03  count  rows  columns  pixel pixel pixel ...
    labels   00 00 08 01  count  label label label ...
                │  │  └── number of dimensions
                │  └───── type of an entry: 08 = unsigned byte
                └──────── always zero

``load("sample")``  reads the 3000 training and 1000 test images that ship in this package: the
                    first 300 and 100 of each class.
``load("full")``    reads all 60000 and 10000, from the Debian package dataset-fashion-mnist where
                    it is installed, else from the cache folder, where it first downloads them to.
``load(folder)``    reads the four files in a folder.

The reader is strict: a file that is not exactly what it should be is an error that names it. A
training on half the data would run too, and be believed.
"""

import gzip
import math
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from evener.errors import EvenerError
from evener.textbook.download import DownloadError, OnBytes, RemoteFile, fetch

__all__ = ["DataError", "FashionMNIST", "Part", "find_full", "load", "read_idx"]

NUM_CLASSES = 10
IMAGE_SIZE = (28, 28)

SAMPLE_FOLDER = Path(__file__).parent / "sample"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

# The authors publish MD5 sums; these SHA-256 sums are of files that have those MD5 sums.
FILES = (
    RemoteFile(
        "train-images-idx3-ubyte.gz",  # MD5 8d4fb7e6c68d591d4c3dfef9ec88bf0d
        26_421_880,
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    ),
    RemoteFile(
        "train-labels-idx1-ubyte.gz",  # MD5 25c81989df183df01b3e8a0aad5dffbe
        29_515,
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
    RemoteFile(
        "t10k-images-idx3-ubyte.gz",  # MD5 bef4ecab320f06d8554ea6380940ec79
        4_422_102,
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    RemoteFile(
        "t10k-labels-idx1-ubyte.gz",  # MD5 bb300cfdad3c16e7a12a480ee83cd310
        5_148,
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)

_WAYS = (
    "three ways to the full data: give a folder with its four files (--data FOLDER), or "
    '"apt install dataset-fashion-mnist", or let it be downloaded (--data full, with network)'
)


class DataError(EvenerError, ValueError):
    """Data that is not there, or not what it should be; the message names the file."""


@dataclass(frozen=True)
class Part:
    """Pictures with their labels.

    Attributes:
        images: (num, 1, 28, 28) uint8, 0 (background) to 255.
        labels: (num,) int64, 0 to 9.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class FashionMNIST:
    """The data of a training.

    Attributes:
        train: what is learned from.
        test: what the accuracy is measured on.
        source: the folder that it was read from.
    """

    train: Part
    test: Part
    source: str

    def limited(self, num: int) -> "FashionMNIST":
        """Give the first ``num`` training and test images, or all where there are fewer.

        Raises:
            DataError: if ``num`` is less than 1.
        """
        if num < 1:
            raise DataError(f"limit={num}: expected at least 1 image")
        return replace(
            self,
            train=Part(self.train.images[:num], self.train.labels[:num]),
            test=Part(self.test.images[:num], self.test.labels[:num]),
        )


def load(data: str | Path = "sample", *, on_bytes: OnBytes | None = None) -> FashionMNIST:
    """Read the data set.

    Args:
        data: ``"sample"`` (default), ``"full"``, or a folder with the four files, each with or
            without ``.gz``. Write ``"./full"`` for a folder of that name.
        on_bytes: told of the progress of a download. Default: nobody is told.

    Raises:
        DataError: if there is no such folder, a file is missing, truncated or not what it
            should be, or the full data can be had in none of the three ways.
    """
    if data == "sample":
        return _read_folder(SAMPLE_FOLDER)
    if data == "full":
        return _read_folder(find_full(on_bytes=on_bytes))
    folder = Path(data)
    if not folder.is_dir():
        raise DataError(f'data={str(data)!r} is not "sample", "full" or a folder; {_WAYS}')
    return _read_folder(folder)


def find_full(
    *,
    debian_folder: Path = DEBIAN_FOLDER,
    cache_folder: Path | None = None,
    url: str = MIRROR,
    files: tuple[RemoteFile, ...] = FILES,
    timeout_s: float = 30.0,
    on_bytes: OnBytes | None = None,
) -> Path:
    """Give the folder of the full data set; download it if it is nowhere.

    Args:
        debian_folder: taken if it exists. Default: where the Debian package puts the files.
        cache_folder: where downloads go. Default ``evener/fashion-mnist`` in
            ``$XDG_CACHE_HOME``, or in ``~/.cache`` where that is not set.
        url: where to download from. Default: the authors' server.
        files: what to download.
        timeout_s: how long the server may stay silent, in seconds. Default 30.
        on_bytes: told of the progress of a download. Default: nobody is told.

    Raises:
        DataError: if the download fails; the message says why and names all ways.
    """
    if debian_folder.is_dir():
        return debian_folder
    try:
        folder = cache_folder or _cache_folder()
        fetch(url, files, folder, timeout_s=timeout_s, on_bytes=on_bytes)
    except (DownloadError, RuntimeError) as error:  # RuntimeError: there is no home folder
        raise DataError(f"{error}; {_WAYS}") from error
    return folder


def _cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is to be ignored.
    return (base if base.is_absolute() else Path.home() / ".cache") / "evener" / "fashion-mnist"


def _read_folder(folder: Path) -> FashionMNIST:
    return FashionMNIST(_read_part(folder, "train"), _read_part(folder, "t10k"), str(folder))


def _read_part(folder: Path, part: str) -> Part:
    images_path = _find(folder, f"{part}-images-idx3-ubyte")
    labels_path = _find(folder, f"{part}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, IMAGE_SIZE), read_idx(labels_path, ())
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path} has {len(labels)} labels, expected {len(images)}: one for each "
            f"image in {images_path}"
        )
    if labels.max() >= NUM_CLASSES:
        raise DataError(
            f"{labels_path} has the label {int(labels.max())}, expected 0 to {NUM_CLASSES - 1}"
        )
    return Part(images.unsqueeze(1), labels.long())


def _find(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.gz", folder / name):
        if path.exists():
            return path
    raise DataError(f"{folder} has no file {name}.gz or {name}; {_WAYS}")


def read_idx(path: Path, entry_size: tuple[int, ...]) -> Tensor:
    """Read a file of unsigned bytes in the IDX format, gzip-compressed or not.

    Args:
        path: the file. Whether it is compressed is seen from its first bytes, not from its name.
        entry_size: the size of one entry: ``(28, 28)`` for images, ``()`` for labels.

    Returns:
        (num, *entry_size) uint8, with at least one entry.

    Raises:
        DataError: if it cannot be read, is truncated, or differs from what is expected.
    """
    content = _unpacked(path)
    num_dims = 1 + len(entry_size)
    magic, expected = content[:4].hex(" "), bytes((0, 0, 8, num_dims)).hex(" ")
    if magic != expected:
        raise _wrong(path, f"it begins with {magic or 'nothing'}, expected {expected}")
    header_bytes = 4 + 4 * num_dims
    if len(content) < header_bytes:
        raise _wrong(path, f"it has {len(content)} bytes, expected a header of {header_bytes}")
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, header_bytes, 4)]
    if tuple(sizes[1:]) != entry_size or sizes[0] == 0:
        raise _wrong(path, f"its sizes are {sizes}, expected {['1 or more', *entry_size]}")
    num_bytes = header_bytes + math.prod(sizes)
    if len(content) != num_bytes:
        raise _wrong(path, f"it holds {len(content)} bytes, expected {num_bytes}")
    # A bytearray, since frombuffer wants memory that may be written to.
    return torch.frombuffer(content, dtype=torch.uint8, offset=header_bytes).reshape(sizes)


def _unpacked(path: Path) -> bytearray:
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:  # EOFError: a truncated gzip file
        raise _wrong(path, f"it cannot be read ({error})") from error
    return bytearray(content)


def _wrong(path: Path, why: str) -> DataError:
    return DataError(f"{path} is not a right file of Fashion-MNIST: {why}; {_WAYS}")
