"""The commands of the program, one a file; :mod:`torchpact.cli` puts them together."""
