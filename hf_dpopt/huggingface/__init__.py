"""What plugs the private step into transformers: arguments, trainer, model checks, release of the folder."""
