"""Random numbers: the secret generator of noise and sampling, and the generators of the host process."""
