"""`python -m tests.bench NAME...` runs these benches, `python -m tests.bench` all of them.

A bench that fails does not keep the others from running; the exit code then is 1.
"""

import argparse
import sys
import traceback

from tests.bench import harness


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of: {', '.join(harness.names())}; all when none is named"
    )
    chosen = parser.parse_args().names or harness.names()
    if unknown := sorted(set(chosen) - set(harness.names())):
        parser.error(f"no bench {', '.join(unknown)}; there are: {', '.join(harness.names()) or 'none'}")
    failed = [name for name in chosen if not _run(name)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str) -> bool:
    print(f"== {name}", flush=True)
    try:
        figures = harness.run(name)
    except Exception:
        traceback.print_exc()
        return False
    for key, value in figures.items():
        print(f"{key:32} {value:.6g}")
    return True


if __name__ == "__main__":
    sys.exit(main())
