# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Plans in which replicas, owners, keys and blocks are lost, doubled or moved: none passes that loses an element."""

from __future__ import annotations

import random
import time

from tests.soak import plans, sampling

CASES = range(100_000)


def test_no_plan_passes_that_does_not_write_each_element_once() -> None:
    begin, outcomes = time.monotonic(), []
    for case in sampling.drawn("plans", CASES, share=50):
        rng = random.Random(f"plans {sampling.seed()} {case}")
        plan = plans.plans_of_a_job(rng)
        damages = rng.choices(plans.DAMAGES, k=rng.choice((0, 1, 1, 2)))
        for damage in damages:
            if any(plan):
                damage(rng, plan)
        kind = " and ".join(sorted(damage.__name__ for damage in damages)) if len(damages) < 2 else "two damages"
        context = f"case {case}: {[damage.__name__ for damage in damages]}, {plan}; {sampling.how_to_repeat()}"
        good, why = plans.is_written_once(plan), plans.refusal(plan)
        assert good or why, f"an element is lost or written twice, and the plan passes: {context}"
        assert damages or good == (not why), f"{why or 'passes'}: {context}"
        outcomes.append((kind or "no damage", "refused" if why else "passes: every element is written once"))
    found = sampling.tally(outcomes)
    assert {"refused", "passes: every element is written once"} <= {how for row in found.values() for how in row}
    sampling.record("plans", sampling.Result(time.monotonic() - begin, found))
