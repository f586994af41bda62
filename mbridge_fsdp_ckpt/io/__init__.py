"""File systems and object stores: bounded reads, direct writes, prefetch."""
