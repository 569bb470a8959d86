"""The tables of the five source documents: printed, recomputed by their own formulas, planned, measured."""
