"""What fits where, before anything starts. Pure functions of the standard library: no torch, no GPU needed."""
