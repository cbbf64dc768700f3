"""What tests of several folders share: a tiny private run, processes of several ranks, and the files of a run."""
