"""Loading small made-up IDX files with digests of their own."""

import gzip
import hashlib
import struct

import pytest
import torch

from torchpact_recipes.data import DataError, fashion_mnist, load_fashion_mnist
from torchpact_recipes.data.fashion_mnist import FILES, IdxFile

IMAGES = bytes(range(2 * 3 * 3))
LABELS = bytes([7, 0])
CONTENT = {
    # written by hand: type 8 is unsigned bytes, then the number of dimensions
    "train-images-idx3-ubyte": struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 3, 3) + IMAGES,
    "train-labels-idx1-ubyte": struct.pack(">BBBBI", 0, 0, 8, 1, 2) + LABELS,
}
SMALL = tuple(
    IdxFile(name, "train", shape, hashlib.sha256(CONTENT[name]).hexdigest())
    for name, shape in zip(CONTENT, ((2, 3, 3), (2,)), strict=True)
)


@pytest.fixture
def folder(tmp_path):
    for name, data in CONTENT.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    return tmp_path


def refusal(folder):
    with pytest.raises(DataError) as caught:
        load_fashion_mnist(folder, files=SMALL)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_images_and_labels_are_those_of_the_files(folder):
    found = load_fashion_mnist(folder, files=SMALL)
    assert found.images.shape == (2, 1, 3, 3)
    assert found.images.dtype == torch.uint8
    assert found.images.flatten().tolist() == list(IMAGES)
    assert found.labels.tolist() == [7, 0]
    assert found.labels.dtype == torch.int64


def test_unpacked_files_are_read_as_they_are(folder):
    for name, data in CONTENT.items():
        (folder / f"{name}.gz").unlink()
        (folder / name).write_bytes(data)
    assert load_fashion_mnist(folder, files=SMALL).labels.tolist() == [7, 0]


def test_files_packed_anew_are_the_same(folder):
    name = SMALL[0].name
    (folder / f"{name}.gz").write_bytes(gzip.compress(CONTENT[name], 1, mtime=5))
    assert len(load_fashion_mnist(folder, files=SMALL)) == 2


def test_a_changed_byte_is_refused(folder):
    name = SMALL[0].name
    changed = CONTENT[name][:-1] + b"\0"
    (folder / f"{name}.gz").write_bytes(gzip.compress(changed))
    assert "expected sha256" in refusal(folder)


@pytest.mark.parametrize("extra", [-1, 1, 10_000_000])
def test_a_file_of_another_length_is_refused_before_it_is_unpacked_whole(folder, extra):
    name, data = SMALL[0].name, CONTENT[SMALL[0].name]
    (folder / f"{name}.gz").write_bytes(gzip.compress(data[:extra] if extra < 0 else data + bytes(extra)))
    got = len(data) - 1 if extra < 0 else len(data) + 1
    assert f"expected {len(data)} bytes, got {got}" in refusal(folder)
    (folder / name).write_bytes(data + bytes(max(extra, 1)))
    assert f"expected {len(data)} bytes, got {len(data) + max(extra, 1)}" in refusal(folder)


@pytest.mark.parametrize("data", [b"", b"no gzip", gzip.compress(CONTENT[SMALL[0].name], mtime=0)[:-12]])
def test_what_is_no_whole_gzip_file_is_refused(folder, data):
    (folder / f"{SMALL[0].name}.gz").write_bytes(data)
    message = refusal(folder)
    assert "expected a gzip file" in message or "bytes, got" in message


def test_a_missing_file_says_where_to_get_it(folder):
    (folder / f"{SMALL[1].name}.gz").unlink()
    assert "train-labels-idx1-ubyte.gz: no such file" in refusal(folder)
    assert "dataset-fashion-mnist" in refusal(folder)


def test_another_shape_of_the_same_length_is_refused(folder):
    wrong = IdxFile(SMALL[0].name, "train", (3, 2, 3), SMALL[0].sha256)
    with pytest.raises(DataError, match=r"expected an IDX file of bytes of shape \(3, 2, 3\)"):
        load_fashion_mnist(folder, files=(wrong, SMALL[1]))


def test_an_unknown_split_is_refused(folder):
    with pytest.raises(ValueError, match="expected split to be 'train' or 'test', got 'valid'"):
        load_fashion_mnist(folder, "valid")  # type: ignore[arg-type]


def test_the_folder_of_the_user_comes_before_that_of_debian(folder, monkeypatch):
    monkeypatch.setenv("TORCHPACT_DATA", str(folder))
    monkeypatch.setattr(fashion_mnist, "DEBIAN", folder / "debian")
    with pytest.raises(DataError, match="debian/train-images"):
        load_fashion_mnist(files=SMALL)
    (folder / "fashion-mnist").mkdir()
    for path in folder.glob("*.gz"):
        path.rename(folder / "fashion-mnist" / path.name)
    assert len(load_fashion_mnist(files=SMALL)) == 2


@pytest.mark.skipif(
    not fashion_mnist.DEBIAN.is_dir(), reason="needs the Debian package dataset-fashion-mnist"
)
def test_debians_test_images_have_a_thousand_of_each_class():
    found = load_fashion_mnist(fashion_mnist.DEBIAN, "test")
    assert found.images.shape == (10_000, 1, 28, 28)
    assert found.labels.bincount().tolist() == [1000] * 10
    assert [file.size for file in FILES] == [47_040_016, 60_008, 7_840_016, 10_008]
