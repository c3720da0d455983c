"""So that ``python -m torchpact`` is the command line."""

from torchpact_command import main

if __name__ == "__main__":
    main()
