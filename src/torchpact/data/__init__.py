"""Data: CIFAR-10, fetched and checked; augmentation on the device; the order of batches.

Get it           fetch_cifar10, load_cifar10, load_sample, Images, DataError
Feed it          BatchOrder, augment, crop_and_flip, standardize
"""

from torchpact.data.augment import augment, crop_and_flip, standardize
from torchpact.data.cifar10 import Images, fetch_cifar10, load_cifar10
from torchpact.data.files import DataError, Progress
from torchpact.data.order import BatchOrder
from torchpact.data.sample import load_sample

__all__ = [
    "BatchOrder",
    "DataError",
    "Images",
    "Progress",
    "augment",
    "crop_and_flip",
    "fetch_cifar10",
    "load_cifar10",
    "load_sample",
    "standardize",
]
