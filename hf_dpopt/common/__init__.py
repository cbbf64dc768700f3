"""What every part uses: errors, checks, the log, durable files, collectives. Imports nothing of the package."""
