"""Where chance comes from: the secret generator of noise and draws, and the generators of the host process."""
