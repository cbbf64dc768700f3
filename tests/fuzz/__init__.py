"""Bad input of every kind: arguments, the command line, data, models and the files of a run.

    python -m tests.fuzz --cases 1000 --seed 0      prints the table by family, and every case that broke the promise

The promise: a case ends in less than five seconds, in a run or in one line of the library's own error types, and
nothing is charged for an error. Cases are drawn by hypothesis from the seed, so a seed always gives the same ones.
"""
