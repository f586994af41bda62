"""Optimizer state, whatever the optimizer: `base` says what an adapter does, `adapters` which one does it."""
