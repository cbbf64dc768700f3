"""`python -m hf_dpopt` is the command line `hf-dpopt`."""

from hf_dpopt.cli import main

if __name__ == "__main__":
    main()
