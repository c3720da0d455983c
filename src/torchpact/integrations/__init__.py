"""Adapted networks in the trainers of other packages, one module a package; none is imported by torchpact.

transformers    for its Trainer: PonderMixin, PonderCallback, price_scale, ignores_item_count
"""
