"""The command `kelvin` and the supervisor behind `kelvin up`. Talks HTTP to the services; imports none of them."""
