"""How fast deployed networks are beside the best dense alternative of the same run: ``torchpact bench``."""
