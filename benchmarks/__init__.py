"""Stock `fsdp_dtensor` and this package's format side by side, in one run: `python -m benchmarks --help`."""
