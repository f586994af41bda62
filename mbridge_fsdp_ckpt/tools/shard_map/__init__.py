"""The shard map of `inspect`: which rank holds which block of which key, as a page and as a picture."""
