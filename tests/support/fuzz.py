"""Random networks measured by the library and by brute force: what agrees, what is refused, and what is wrong.

``python tests/support/fuzz.py SEED`` describes the network of a seed and every comparison that failed, ``SEED:SEED``
runs a range and counts. A value is *wrong* if it is off the truth that its method and options say, and *falsely exact*
if it calls itself exact and is off the Hessian's.
A call is refused by a FlatnessError; any other exception is a failure.
"""

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script

from support.cases import on_threads
from support.fuzzed.cases import draw
from support.fuzzed.checks import check
from support.fuzzed.verdicts import Total, Verdict


def judge(seed: int) -> Verdict:
    """Draw the case of a seed and hold what the library says of it against the truth."""
    with on_threads(1):  # the networks are too small for more
        verdict = Verdict(draw(seed))
        check(verdict)
        truth = verdict.case.truth()
        if verdict.failures and any(truth.is_at_kink(name) for name in truth.names):
            verdict.leave_out()
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", help="a seed, or first:end of a range")
    first, _, end = parser.parse_args().seeds.partition(":")
    total = Total()
    warnings.simplefilter("error")
    for seed in range(int(first), int(end or int(first) + 1)):
        verdict = judge(seed)
        total.add(verdict)
        if verdict.failures or not end:
            print(verdict, flush=True)
    print(total)


if __name__ == "__main__":
    main()
