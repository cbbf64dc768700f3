"""Connection of the private step to transformers: arguments, trainer, model checks, release of the folder."""
