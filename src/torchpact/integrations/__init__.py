"""Adapted networks in the trainers of other packages, one module a package; none is imported by torchpact.

transformers    PonderMixin, PonderCallback, price_scale, ignores_item_count: for its Trainer
"""
