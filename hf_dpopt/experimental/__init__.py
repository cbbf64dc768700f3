"""Works and is tested, promised to nobody: may change or go with any release."""
