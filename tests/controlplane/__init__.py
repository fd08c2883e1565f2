"""Test the control plane. These modules stand in for the parts around it, the largest first:

- `control_plane_server.py`: the whole control plane on its socket, in this process or as a program.
- `machine_fixture.py`: the actuator of one machine, with real processes of a fake zygote (`fake_zygote.py`).
- `controller_fixture.py`: a control plane on an in-memory cluster (`fake_cluster.py`), in virtual time.
- `api_server_fixture.py`: a client that speaks a real API server's protocol. `candidates.py`: leader election.
- `autoscaler_fixture.py`: the autoscaler alone with a fake actuator, in virtual time.
- `billing_fixture.py`: a ledger that holds one month, and prices.

`builders.py` makes single values and stores. `database_backends.py` provides the two databases that stores run on.
"""
