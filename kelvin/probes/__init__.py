"""Look at the machine and the data directory for `kelvin doctor`, in bounded time. `policy` judges what was seen."""
