"""Pages that explain a run: loss masks, trajectories, curves."""
