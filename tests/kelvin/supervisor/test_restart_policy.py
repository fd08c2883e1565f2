"""A process that dies is restarted at once. One that keeps dying is restarted with growing delays."""

from kelvin.supervisor.restart_policy import MAX_DELAY_S, STEADY_S, Restarts


def test_the_first_death_restarts_at_once() -> None:
    """A single crash costs no delay."""
    assert Restarts().after_death(1.0).delay_s == 0.0


def test_deaths_in_a_row_wait_longer_up_to_a_limit() -> None:
    """A crash loop doesn't use a whole core."""
    restarts, delays = Restarts(), []
    for _ in range(12):
        restarts = restarts.after_death(0.1)
        delays.append(restarts.delay_s)
    assert delays == sorted(delays)
    assert delays[-1] == MAX_DELAY_S


def test_a_steady_life_forgets_the_deaths_before_it() -> None:
    """An old crash loop doesn't delay a restart."""
    restarts = Restarts(9).after_death(STEADY_S)
    assert restarts.delay_s == 0.0
