"""How often to save: the two formulas of the literature, and what an interval costs.

Let C be the time that a save keeps the trainer from training, and M the mean time between failures of the whole job.

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974:
    sqrt(2 C M)
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
22(3), 2006:
    sqrt(2 C M) (1 + 1/3 sqrt(C / 2M) + 1/9 (C / 2M)) - C   for C < 2 M, else M

Both give the time of training between two saves. All times are seconds.
"""

import math


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Young's interval."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Daly's interval, which holds also where saves are not short beside the time between failures."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def lost_share(interval_s: float, cost_s: float, mtbf_s: float, behind_s: float = 0.0, restart_s: float = 0.0) -> float:
    """The share of time that does not become progress, to first order: saves themselves, and for each failure half an
    interval, what the newest safe state is `behind_s` seconds late, and the restart. May exceed 1: then nothing moves."""
    return cost_s / (interval_s + cost_s) + (interval_s / 2 + cost_s + behind_s + restart_s) / mtbf_s
