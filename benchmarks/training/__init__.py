"""How long whole training runs take, with one thing or another."""
