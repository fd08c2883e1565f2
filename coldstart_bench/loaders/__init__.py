"""Programs that the bench runs as processes of their own. None imports anything of Kelvin; the floor is frozen."""
