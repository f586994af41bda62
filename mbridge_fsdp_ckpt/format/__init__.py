"""The files of the format; docs/format.md specifies them."""
