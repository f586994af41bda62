"""One file for each wrapper: what a wrapped model holds, and where it belongs."""
