"""The command line `hf-dpopt`."""
