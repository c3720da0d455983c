"""Engines for recurrent layers: what runs in place of the time steps of :class:`~torchpact.AdaptiveRNN`.

recurrent           C++ on a CPU
recurrent_gpu       clusters and CUDA graphs on a GPU
recurrent_compact   PyTorch anywhere: halted examples are dropped from the batch of a time step
"""
