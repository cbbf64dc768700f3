"""Code that works and is tested, but may change or go with any release."""
