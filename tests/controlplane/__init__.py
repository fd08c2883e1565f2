"""Tests of the control plane. These modules stand in for what is around it, the largest first:

- `control_plane_server.py`: the whole control plane on its socket, in this process or as the program.
- `machine_fixture.py`: the actuator of one machine, over real processes of a fake zygote (`fake_zygote.py`).
- `plane_world.py`: a control plane on a cluster in memory (`cluster_world.py`), on virtual time.
- `cluster_ground.py`: the client of a real API server's protocol. `candidates.py`: leader election.
- `scaling_world.py`: the autoscaler alone, over a fake actuator, on virtual time.
- `billing_fixture.py`: a ledger with a month in it, and prices.

`builders.py` makes single facts and stores, `database_backends.py` the two databases that the stores are tested on.
"""
