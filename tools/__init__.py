"""Scripts for those who work on the package."""
