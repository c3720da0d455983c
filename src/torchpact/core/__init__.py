"""The paper's equations: halting, relaxation, priors, modes, the halting loop, the block and its objectives.

Pure functions and small modules on tensors; nothing here knows of engines, networks or files.
"""
