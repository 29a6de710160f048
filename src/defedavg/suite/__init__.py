"""A fixed benchmark: every algorithm on the same tasks and fleets, with the same budget to tune its rates."""
