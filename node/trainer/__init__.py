"""Training as a volunteer does it: the loop, what may stop it, and what is told of it."""
