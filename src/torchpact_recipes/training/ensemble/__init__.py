"""Several networks trained at once by the same kernels."""
