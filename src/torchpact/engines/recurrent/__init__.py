"""Recurrent layers: compiled kernels for CPUs and GPUs."""
