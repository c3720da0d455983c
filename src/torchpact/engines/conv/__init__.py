"""Engines for blocks of convolutional units: native (C++), triton, onchip (CUDA) and sparse (PyTorch)."""
