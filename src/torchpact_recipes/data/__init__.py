"""Data: CIFAR-10, Fashion-MNIST and enwik8, checked; augmentation on the device; synthetic tasks.

Images           fetch_cifar10, load_cifar10, load_sample, Images; any file by read_picture
                 load_fashion_mnist
Text             fetch_enwik8, load_enwik8, load_sample_text
Graves' tasks    task, Parity, Logic, Addition, Sort, Task, TaskBatch
Tasks for loops  PrefixSums, ResetParity, DigitAddition, Mazes, Sudokus, LoopTask, LoopBatch
Feed it          BatchOrder, augment, crop_and_flip, standardize, as_input
"""

from torchpact_recipes.data.augment import Images, as_input, augment, crop_and_flip, standardize
from torchpact_recipes.data.cifar10 import fetch_cifar10, load_cifar10
from torchpact_recipes.data.enwik8 import fetch_enwik8, load_enwik8
from torchpact_recipes.data.fashion_mnist import load_fashion_mnist
from torchpact_recipes.data.files import DataError, Progress
from torchpact_recipes.data.image_io import read_picture
from torchpact_recipes.data.loop_tasks import (
    DigitAddition,
    LoopBatch,
    LoopTask,
    Mazes,
    PrefixSums,
    ResetParity,
    Sudokus,
)
from torchpact_recipes.data.sample import load_sample
from torchpact_recipes.data.sample_text import load_sample_text
from torchpact_recipes.data.sampler import BatchOrder
from torchpact_recipes.data.tasks import Addition, Logic, Parity, Sort, Task, TaskBatch, task

__all__ = [
    "Addition",
    "BatchOrder",
    "DataError",
    "DigitAddition",
    "Images",
    "Logic",
    "LoopBatch",
    "LoopTask",
    "Mazes",
    "Parity",
    "PrefixSums",
    "Progress",
    "ResetParity",
    "Sort",
    "Sudokus",
    "Task",
    "TaskBatch",
    "as_input",
    "augment",
    "crop_and_flip",
    "fetch_cifar10",
    "fetch_enwik8",
    "load_cifar10",
    "load_enwik8",
    "load_fashion_mnist",
    "load_sample",
    "load_sample_text",
    "read_picture",
    "standardize",
    "task",
]
