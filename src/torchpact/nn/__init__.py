"""Networks made of adaptive blocks: convolutional units, halting heads, transformer and recurrent layers.

Mathematics only: how active positions get computed is the business of :mod:`torchpact.engines`.
"""
