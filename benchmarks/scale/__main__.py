# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a rank's cost does as the number of ranks grows: `python -m benchmarks.scale meetings`, for example."""

from __future__ import annotations

import argparse
import sys

from benchmarks.scale import chunks, meetings, pages, planning

BENCHMARKS = {
    one.command.split()[-1]: one for one in (meetings.BENCHMARK, pages.BENCHMARK, chunks.BENCHMARK, planning.BENCHMARK)
}


def main() -> None:
    """Run the benchmark that the first word names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    titles = "; ".join(f"{name}: {one.title[0].lower()}{one.title[1:]}" for name, one in BENCHMARKS.items())
    parser.add_argument("what", choices=BENCHMARKS, help=titles)
    BENCHMARKS[parser.parse_args(sys.argv[1:2]).what].main(sys.argv[2:])


if __name__ == "__main__":
    main()
