"""Programs that the bench runs as processes of their own. `harness/program_runner.py` starts them.

The rival loaders import nothing of Kelvin. `kelvin_loader.py`, `lease_storm.py`, `first_step.py`, `publish_versions.py`
and `fleet_*.py` import the code that they measure. `fake_upstream.py` replaces a control plane and replicas, and
imports only contracts and sockets. The frozen floors are in `floors`. Begin with `json_lines.py`: most programs answer
lines of JSON.
"""
