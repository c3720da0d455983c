"""What the package does before it imports anything: ``python -m torchpact`` may be interrupted already."""

import sys

if sys.argv[:1] == ["-m"]:  # until Python knows the file of the program, whose package it imports first
    from torchpact_command import end_in_one_line, is_program

    if is_program(sys.orig_argv):
        end_in_one_line()
