"""From `torch_dist`."""
