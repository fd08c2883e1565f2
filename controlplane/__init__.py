"""What exists, what should run, and what it cost: registry, scaling, ledger, admin API."""
