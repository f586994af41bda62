"""The steps of a load."""
