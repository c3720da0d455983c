"""Pictures of what a network computes. matplotlib is only imported when one is drawn.

Maps of computation time    ponder_maps, PonderMaps
Figures of them             compare_maps, show_blocks
Files                       canvas, save
"""

from torchpact_recipes.viz.figures import canvas, save
from torchpact_recipes.viz.map_figures import compare_maps, show_blocks
from torchpact_recipes.viz.maps import PonderMaps, ponder_maps

__all__ = ["PonderMaps", "canvas", "compare_maps", "ponder_maps", "save", "show_blocks"]
