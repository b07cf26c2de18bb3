"""DFlash: a block-diffusion drafter that reads fused hidden states of the target.

Files: config (shapes), model (network), anchors, attention (masks), loss, metrics, objective (one
row to one loss), initialise, drafting (inference), checkpoint (z-lab layout), speculators (the other
layout), export, lint with findings and rules. None knows of rings.
"""
