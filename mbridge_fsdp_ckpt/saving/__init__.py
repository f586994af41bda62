"""The steps of a save."""
