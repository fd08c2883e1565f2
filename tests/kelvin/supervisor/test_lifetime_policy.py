"""A lifetime's parts are the runtime's own counts. Its total is by the supervisor's clock."""

from dataclasses import replace

from kelvin.contracts.accounting.meter_format import Meter, Phase
from kelvin.supervisor.lifetime_policy import ChildDeath, lifetime_record, unseen_death


def _meter() -> Meter:
    meter = Meter(Phase.STANDBY, 0, 0, tenant="default", model="m", version="f" * 64, device_class="cpu-1", requests=2)
    return meter.enter(Phase.RESTORE, 1_000_000).enter(Phase.ACTIVE, 3_000_000)


def test_the_open_interval_ends_with_the_death() -> None:
    """A replica killed while active counts as active until its death."""
    death = ChildDeath("rt-1", 42, 9_000_000, 1_000_000, 9_001, -9, 5, 6)
    record = lifetime_record(_meter(), death, "supervisor-1", 3)
    assert (record.standby_us, record.restore_us, record.active_us, record.idle_us) == (1_000, 2_000, 6_000, 0)
    assert record.total_us == 9_001
    assert record.born_at_us == 1_000_000 - 9_001
    assert (record.requests, record.exit_status, record.sequence) == (2, -9, 3)


def test_idle_is_never_a_remainder() -> None:
    """If the clocks disagree, the record shows it and doesn't hide it in idle time."""
    death = ChildDeath("rt-1", 42, 9_000_000, 1_000_000, 50_000, 0, 0, 0)
    record = lifetime_record(_meter(), death, "s", 1)
    parts = record.standby_us + record.restore_us + record.active_us + record.idle_us
    assert parts == 9_000
    assert record.total_us == 50_000


def test_an_unseen_death_ends_with_the_last_transition() -> None:
    """A replica that died with its supervisor is billed up to its last transition."""
    death = unseen_death(_meter(), "rt-1", 42, now_ns=20_000_000, now_at_us=500_000, boot="b")
    assert death is not None
    assert death.total_us == 3_000
    assert death.died_at_us == 500_000 - 17_000


def test_a_page_of_another_boot_is_no_lifetime() -> None:
    """Monotonic clocks of two boots can't be compared."""
    assert unseen_death(_meter(), "rt-1", 42, now_ns=2, now_at_us=500_000, boot="b") is None


def test_a_page_of_a_shorter_boot_is_no_lifetime() -> None:
    """The page's times would fit this boot too, but the boot ids differ."""
    page = replace(_meter(), boot="an earlier one")
    assert unseen_death(page, "rt-1", 42, now_ns=20_000_000, now_at_us=500_000, boot="this one") is None
    assert unseen_death(page, "rt-1", 42, now_ns=20_000_000, now_at_us=500_000, boot="an earlier one") is not None
