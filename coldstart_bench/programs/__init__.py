"""Programs that the bench runs as processes of their own.

The rival loaders import nothing of Kelvin. `kelvin_loader.py`, `lease_storm.py`, `first_step.py`, `publish_versions.py`
and `fleet_*.py` import what they measure or make. `fake_upstream.py` stands for a control plane and a replica, and
imports contracts. The frozen floors are in `floors`; what starts all of them is `harness/program_runner.py`. Begin with
`json_lines.py`: most programs answer lines of JSON.
"""
