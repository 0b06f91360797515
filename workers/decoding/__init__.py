"""The decoder: states, noise, commit rules, verification and the loop that joins them."""
