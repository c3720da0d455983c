"""Active pixels on a GPU, in Triton."""
