"""Make the sample of Fashion-MNIST that ships inside the package.

Takes the first 300 training and the first 100 test images of each class, in the order of the
full data set, so that anybody who has the full data set can make them again::

    python scripts/make_sample.py [FOLDER_OF_THE_FULL_DATA_SET]

The default folder is that of the Debian package dataset-fashion-mnist.
"""

# ruff: noqa: INP001 - a program, not a package

import gzip
import struct
import sys
from pathlib import Path

FULL = Path("/usr/share/datasets/fashion-mnist")
SAMPLE = Path(__file__).resolve().parent.parent / "src" / "evener" / "textbook" / "sample"
NUM_CLASSES = 10
IMAGE_BYTES = 28 * 28


def first_of_each_class(labels: bytes, num_each: int) -> list[int]:
    """Give the positions of the first ``num_each`` labels of each class, in file order."""
    seen = [0] * NUM_CLASSES
    chosen = []
    for position, label in enumerate(labels):
        if seen[label] < num_each:
            seen[label] += 1
            chosen.append(position)
    if seen != [num_each] * NUM_CLASSES:
        raise SystemExit(f"too few images: {seen} of each class, {num_each} wanted")
    return chosen


def write_gzip(path: Path, content: bytes) -> None:
    """Write a gzip file without name and time in its header, so that it never differs."""
    path.write_bytes(gzip.compress(content, compresslevel=9, mtime=0))


def make(full: Path, sample: Path, part: str, num_each: int) -> None:
    """Write the images and labels of one part, ``train`` or ``t10k``, into ``sample``."""
    images = gzip.decompress((full / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((full / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]
    chosen = first_of_each_class(labels, num_each)
    write_gzip(
        sample / f"{part}-images-idx3-ubyte.gz",
        struct.pack(">4I", 0x00000803, len(chosen), 28, 28)
        + b"".join(images[i * IMAGE_BYTES : (i + 1) * IMAGE_BYTES] for i in chosen),
    )
    write_gzip(
        sample / f"{part}-labels-idx1-ubyte.gz",
        struct.pack(">2I", 0x00000801, len(chosen)) + bytes(labels[i] for i in chosen),
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FULL
    SAMPLE.mkdir(parents=True, exist_ok=True)
    make(folder, SAMPLE, "train", 300)
    make(folder, SAMPLE, "t10k", 100)
