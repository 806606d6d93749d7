"""Colours that colour-blind people can tell apart, for figures and pages."""

# Okabe and Ito's palette, the most different ones first; its yellow is too pale for lines on white and comes last.
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
CLASSES = (*PALETTE, "#999999", "#882255")  # two more for points, which ten classes need
