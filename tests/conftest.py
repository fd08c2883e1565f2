"""What holds for every test."""

from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine's neighbours than about the example.
settings.register_profile("kelvin", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kelvin")
