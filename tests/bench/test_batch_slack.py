"""A batch without end costs interactive calls next to nothing, and gets work done: the router's own policy, virtual time."""

from __future__ import annotations

from bench.batch_slack import rows

UNTIL_S = 45.0


def test_interactive_attainment_loses_at_most_a_point_beside_a_batch_that_uses_the_slack() -> None:
    found = list(rows([0.6], [1], UNTIL_S))
    assert len(found) == 4
    for row in found:
        assert row.attainment_alone > 0.9
        assert row.loss_points <= 1.0, row
        assert row.batch_tokens_per_s > 50, row
