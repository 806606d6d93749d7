"""Colours that colour-blind people can tell apart, for figures and pages."""

# Okabe and Ito's palette, the most different ones first; its yellow is too pale for lines on white, and Paul Tol's wine
# is in its place.
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
CLASSES = (*PALETTE[:7], "#F0E442", "#999999", "#882255")  # for points, which have an outline; ten classes need ten
