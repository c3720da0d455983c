"""Active pixels on a CPU, in C++."""
