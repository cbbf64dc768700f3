"""Parts of the release scan: containers, pickles, known secrets, credentials, un-noised values, training text."""
